"""The gateway: sessions, the APIs of `dialects`, token-in token-out, every turn on the log before its last byte."""
