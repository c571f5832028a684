"""The policy's output, parsed while it is generated into reasoning, text and tool calls.

`parser` has the state machine, the types and the values of calls, `formats` how families of models write calls and
reasoning, `families` the readers of those calls.
"""
