"""`turnlog archive`: copies of the topics in the object store; replay outlives the topics."""
