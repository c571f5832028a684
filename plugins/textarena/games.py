"""A game of TextArena that is the same in every process: one seed and the same actions give the same observations and
rewards.

TextArena seeds the generator of the module `random`, which the whole process shares, and draws from it during the game.
Two games at once, or anything else that draws, would change each other's course. So TextArena's modules get a stand-in
for `random`, which draws from the generator of the game that acts in this thread. The numbers are those that TextArena
itself would draw in a process with this game alone.

Raises GameRefused if a game cannot be played: the message says why, and what to do.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

WORDS: Final = "corpora/words"
TAGGER: Final = "taggers/averaged_perceptron_tagger_eng"
NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "Codenames": (WORDS, TAGGER),
    "DontSayIt": (WORDS, TAGGER),
    "Hangman": (WORDS,),
    "LetterAuction": (WORDS,),
    "WordChains": (WORDS,),
    "WordLadder": (WORDS,),
    "WordSearch": (WORDS,),
    "Wordle": (WORDS, TAGGER),
}
"""Folder of a game in TextArena -> the data of NLTK that it reads. TextArena downloads them while it is imported; here
they must be present."""
ASKS_A_MODEL: Final = "a model behind OpenRouter answers the questions, so the same actions may get other observations"
UNPLAYABLE: Final[Mapping[str, str]] = {
    "GuessWho": ASKS_A_MODEL,
    "TwentyQuestions": ASKS_A_MODEL,
}
"""Folder of a game in TextArena -> why it cannot be played."""
_FOUND = threading.local()
"""`generator`: the generator of the game that acts in this thread."""
_LOADING = threading.RLock()


class GameRefused(Exception):
    """The game cannot be played here; see the message."""


class _GameRandom:
    """Stands for the module `random` in the modules of TextArena. Outside a game it is that module."""

    def Random(self, seed: Any = None) -> random.Random:
        """Return a generator. Without a seed, the game's own generator gives it one."""
        return random.Random(self.getrandbits(64) if seed is None else seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_FOUND, "generator", random), name)


_GAME_RANDOM: Final = _GameRandom()


class TextGame:
    """A game and its progress. It may be used by one thread at a time."""

    def __init__(self, game: str, seed: int, players: int = 1) -> None:
        """Begin the game `game`, a name of TextArena's registry such as `FrozenLake-v0`. Raises GameRefused."""
        self._generator = random.Random(seed)
        self._seen: dict[int, str] = {}
        self._echo: dict[int, str] = {}
        self.rewards: dict[int, float] = {}
        """Reward of each player, from -1 to 1 in most games; empty until the game is over."""
        self.reason = ""
        """Reason of the game's end, in TextArena's words."""
        self.done = False
        make = _factory(game)
        with self._acting():
            try:
                self._env = make()
                self._env.reset(num_players=players, seed=seed)
            except Exception as error:  # each game has its own way to refuse a number of players
                why = f"{type(error).__name__}: {error}"
                raise GameRefused(f"TextArena's {game} cannot begin with {players} player(s): {why}") from error
        if players == 1 and not _is_for_one(self._env.state):
            raise GameRefused(f"TextArena's {game} is a game for several players")
        self.player: int = self._env.state.current_player_id
        """Number of the player who acts next, from 0."""

    def observe(self) -> str:
        """Return what is new to the player who acts next since their last observation: text in TextArena's words,
        without the player's own action."""
        with self._acting():
            player, found = self._env.get_observation()
        text, before = str(found), self._seen.get(player, "")
        self._seen[player] = text
        if before and text.startswith(before):
            text = text[len(before) :]
            text = text.removeprefix(self._echo.pop(player, ""))
        return text.strip("\n")

    def act(self, action: str) -> None:
        """Carry out the action of the player whose turn it is."""
        self._echo[self.player] = self._format_echo(action)
        with self._acting():
            self.done, _ = self._env.step(action=action)
            if self.done:
                rewards, info = self._env.close()
                self.reason = str(info.get(self.player, {}).get("reason") or "")
                self.rewards = {player: _number(reward, self.reason) for player, reward in (rewards or {}).items()}
        self.player = self._env.state.current_player_id

    def _format_echo(self, action: str) -> str:
        """Return how the player's own history repeats an action, which other players' histories keep."""
        from textarena import ActionWrapper, Wrapper

        env = self._env
        while isinstance(env, Wrapper):
            action = env.action(action) if isinstance(env, ActionWrapper) else action
            env = env.env
        roles = self._env.state.role_mapping
        for role in roles.values():
            action = action.replace(f"[{role}]", "")
        return f"\n[{roles.get(self.player, f'Player {self.player}')}] {action}"

    @contextlib.contextmanager
    def _acting(self) -> Iterator[None]:
        _FOUND.generator = self._generator
        try:
            yield
        finally:
            del _FOUND.generator


def _number(reward: Any, reason: str) -> float:
    """Return the reward as a number. Countdown of TextArena 0.7.4 exchanges the two after an invalid move: its reward
    is a text, and its reason ends in the number."""
    return float(reason.rpartition(" ")[2] if isinstance(reward, str) else reward)


def single_player_games() -> tuple[str, ...]:
    """Return the games for one player that can be played here, without the variants `-train` and `-raw`."""
    from textarena.envs.registration import ENV_REGISTRY

    names = [name for name in ENV_REGISTRY if not name.endswith(("-train", "-raw"))]
    return tuple(name for name in names if not single_player_refusal(name))


def single_player_refusal(game: str) -> str:
    """Return why the game cannot be played here by one player; empty if it can. It is decided from the game's module,
    without beginning the game, which takes seconds for some. Raises GameRefused."""
    if why := refusal(game):
        return why
    try:
        module = _import_module(_module_of(game))
    except (ImportError, SyntaxError) as error:
        return f"it cannot be imported: {type(error).__name__}: {error}"
    return "" if "SinglePlayerState" in inspect.getsource(module) else "it is a game for several players"


def refusal(game: str) -> str:
    """Return why the game cannot be played here; empty if it can. Raises GameRefused."""
    folder = _folder(game)
    if folder in UNPLAYABLE:
        return UNPLAYABLE[folder]
    lacking = [data for data in NEEDED.get(folder, ()) if not _has_data(data)]
    if not lacking:
        return ""
    names = " ".join(data.partition("/")[2] for data in lacking)
    return f"it reads data of NLTK that are not here: python -m nltk.downloader {names} (on each machine of the run)"


def _is_for_one(state: Any) -> bool:
    from textarena import SinglePlayerState

    return isinstance(state, SinglePlayerState)


def _folder(game: str) -> str:
    """Return the game's folder in TextArena. Raises GameRefused."""
    try:
        from textarena.envs.registration import ENV_REGISTRY
    except ModuleNotFoundError as error:
        if error.name != "textarena":
            raise
        raise GameRefused("TextArena is not installed: pip install turnlog[textarena]") from error
    if game not in ENV_REGISTRY:
        raise GameRefused(
            f"TextArena has no game {game!r}; python -c 'import textarena as t; t.pprint_registry_detailed()'"
        )
    return _module_of(game).split(".")[2]


def _module_of(game: str) -> str:
    from textarena.envs.registration import ENV_REGISTRY

    return str(ENV_REGISTRY[game].entry_point).partition(":")[0]


def _has_data(name: str) -> bool:
    import nltk

    for path in (name, f"{name}.zip"):
        with contextlib.suppress(LookupError):
            nltk.data.find(path)
            return True
    return False


def _factory(game: str) -> Callable[[], Any]:
    """Return what makes the game's environment, once its modules draw from the generator of their game. Raises
    GameRefused."""
    if why := refusal(game):
        raise GameRefused(f"TextArena's {game} cannot be played: {why}")
    import textarena

    try:
        _import_module(_module_of(game))
    except (ImportError, SyntaxError) as error:  # some modules of 0.7.4 are no valid Python 3.11
        raise GameRefused(f"TextArena's {game} cannot be imported: {type(error).__name__}: {error}") from error
    return lambda: textarena.make(game)


def _import_module(name: str) -> ModuleType:
    """Import a module of TextArena, and isolate all that came with it. Raises ImportError, SyntaxError."""
    import nltk

    with _LOADING:
        download, nltk.download = nltk.download, _nothing  # modules of games download when they are imported
        try:
            module = importlib.import_module(name)
        finally:
            nltk.download = download
        for known, found in list(sys.modules.items()):
            if known.partition(".")[0] == "textarena":
                _isolate(found)
        return module


def _isolate(module: ModuleType) -> None:
    """Let the module draw from the generator of its game, print nothing, and download nothing."""
    names = vars(module)
    if names.get("random") is random:
        names["random"] = _GAME_RANDOM
    if isinstance(names.get("nltk"), ModuleType):
        names["nltk"] = _Offline(names["nltk"])
    names.setdefault("print", _nothing)


class _Offline:
    """Stands for the module `nltk`: everything of it but downloads."""

    download = staticmethod(lambda *_, **__: True)

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _nothing(*_: Any, **__: Any) -> None:
    """Stand for `print` and for downloads."""
