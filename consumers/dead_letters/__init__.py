"""`turnlog dead-letters`: what was refused and why, records given a second chance, units let past a record."""
