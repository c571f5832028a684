"""The archive of a log: files of closed ranges in the store, and a log that is read from them."""
