"""What a policy said, taken apart while it is being said: reasoning, text, tool calls.

`parser` has the machine and the types, `formats` how families of models write calls and reasoning, `families` the
readers of those calls, `values` what stands in them.
"""
