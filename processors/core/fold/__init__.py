"""The fold: records of the agent topics become turn trees, samples and group scores, group by group."""
