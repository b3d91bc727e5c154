"""A simulated draft and target of one profile, which agree on the text in any process."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bough.simulation.profile import Profile, load_profile
from bough.simulation.text_model import FIRST_WORD, NUM_WORDS, TextModel
from bough.simulation.tokenizer import END_TOKEN, simulated_tokenizer
from bough.tokenization.vocabulary import TokenizerFiles

END_RATE = 0.01  # share of positions with the end token


class SimulatedPair(NamedTuple):
    """A profile, and the distribution of the text that its workers agree on."""

    name: str  # of the profile, or of its file without extension
    profile: Profile
    text_model: TextModel
    tokenizer: TokenizerFiles

    @property
    def fingerprint(self) -> str:
        """Equal for targets that simulate the same model and machine, independent of events and failures."""
        calm = replace(self.profile, source="", events=(), failures=(), clock_scale=1.0)
        content = f"{calm!r} {self.text_model!r} {self.tokenizer.fingerprint}"
        return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer."""
        return len(self.tokenizer.vocabulary)

    def notes(self) -> tuple[str, ...]:
        """Notes for the worker's info: that it is simulated, and how."""
        profile = self.profile
        notes = [
            f"simulated: profile {self.name}, no weights; words are drawn by seed and position and mean nothing",
            f"profile: {profile.source}",
            "penalties, biases and filters are accepted and do not change simulated text",
        ]
        if profile.clock_scale != 1.0:
            notes.append(f"the clock is scaled: {profile.clock_scale:g} simulated seconds in a real one")
        if profile.events or profile.failures:
            notes.append(f"{len(profile.events)} events and {len(profile.failures)} failures happen in mid-run")
        return tuple(notes)


def simulated_pair(name: str) -> SimulatedPair:
    """The pair of a shipped profile or a JSON file.

    Raises:
        ConfigError: it is neither, or a field is invalid.
    """
    profile = load_profile(name)
    text_model = TextModel(profile.acceptance, FIRST_WORD, NUM_WORDS, END_TOKEN, END_RATE)
    return SimulatedPair(Path(name).stem, profile, text_model, simulated_tokenizer())
