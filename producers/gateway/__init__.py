"""The gateway: sessions, OpenAI chat completions, token-in token-out, every turn on the log before its last byte."""
