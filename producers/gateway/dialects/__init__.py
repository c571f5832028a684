"""The APIs that agents speak, each a translation to and from the house's own messages; OpenAI's chat is the first."""
