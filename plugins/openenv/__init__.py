"""OpenEnv: environments behind HTTP and WebSocket servers, as tasks whose steps are tool calls on the log.

`client` speaks to a server, `tool` is the tool `openenv` of sandbox workers, `servers` starts servers, and `source`
makes tasks. docs/environments/openenv.md is for users. The wire format is that of openenv 0.10.0."""
