"""What every role is made of: its clients, its health and log lines, and the run that it serves."""
