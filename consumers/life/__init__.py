"""Commands with which an owner steers runs: phases, list, fork, delete, garbage collection, engines, and checks."""
