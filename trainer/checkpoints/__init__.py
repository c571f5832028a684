"""What a checkpoint holds (`state`), and how it is written while training goes on (`saves`). Where it lies is in
`turnlog.trainer.checkpoint`."""
