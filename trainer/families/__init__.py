"""Model families: how config.json of a Hugging Face folder, Megatron's options and the names of tensors correspond.

`family.py` has the description, `shape.py` the values of one model, `tensors.py` the mapping of tensors. Every other
module that `family.BUILT_IN` names is a family; a package adds another one by the entry point `turnlog.models`
(docs/models.md).
"""
