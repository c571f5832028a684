"""`turnlog session rerun|show`: a recorded session's tool calls, executed again in a fresh sandbox and compared."""
