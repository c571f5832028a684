"""The tool of the taskset, served by a process of its own."""

import verifiers.v1 as vf


class CountingTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "lab"

    @vf.tool
    def count(self, number: int) -> str:
        """Count to a number."""
        return f"counted {number}"


if __name__ == "__main__":
    CountingTools.run()
