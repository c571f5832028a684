"""Games of TextArena as tasks. Extra `textarena`; TextArena is imported when the first game is made."""
