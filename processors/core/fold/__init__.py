"""The fold: records of the agent topics to turn trees, samples and group scores, group by group."""
