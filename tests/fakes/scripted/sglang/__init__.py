"""What `python -m sglang.launch_server` finds with the folder above on PYTHONPATH, before SGLang's own: for tests of
where engines run, and not of what they say.
"""
