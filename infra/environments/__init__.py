"""The environment contract: recipes (tasks, prompt, agent), their tools, the files that their sandboxes begin with,
and the verifiers that judge a session."""
