"""What a learned memory is made of, where the paper leaves a choice or its text did not learn.

As the paper's text has it, the memory's part of the output begins at 1e-5 of the local part or
less, and write and read addresses begin uncorrelated: recall stays at chance. The defaults learn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

MemoryDecay = Literal["none", "erase", "backbone"]
MemoryValue = Literal["input", "step"]
StraightThrough = Literal["neighbour", "one_sided"]
RouterInit = Literal["previous_token", "average", "random"]


@dataclass(frozen=True)
class MemorySettings:
    """The settings of a memory; `MemorySettings.paper()` is the arm as the paper's text has it.

    >>> MemorySettings(selector_conv=3).memory_decay
    'none'
    >>> MemorySettings.paper().memory_decay
    'backbone'
    >>> MemorySettings(gate_init=1.5)
    Traceback (most recent call last):
    ValueError: gate_init must lie between 0 and 1, got 1.5

    memory_decay: "none" keeps what was written ("all SMat masks were gated in the recurrent
        section"). "backbone" reuses the backbone's transitions, as appendix "Memory updates" says.
        "erase" is between them for a delta rule: it keeps I - beta k k' and drops a. Under it
        Gated DeltaNet learned MQAR far later, with one head not within 3,000 steps.
    memory_value: "input" writes v = x, since omega is "an independent write gate"; "step" writes
        what Mamba-2's recurrence does, step x. Gated DeltaNet has no step, and takes no notice.
    gate_init: where read and write gates begin. The paper names no value; ours were 0.1.
    straight_through: "neighbour" lets the gradient of a hash compare a token's bin with the next
        one, the whole interpolation; "one_sided" is the paper's omega, which knows its own bin.
    router_init: "previous_token" starts the hash's convolution as the token before, and the scorer
        at the centres of the hash's bins, so that what is written under a token is read by it;
        "average" starts with equal taps instead, which did for one key only; "random" is torch's
        draw. The paper names none. Selectors that read by the query's own hash keep the draw.
    selector_conv: the width of a short convolution before the scorer, 0 for none (the paper's): in
        a one-layer model the scorer sees the last key alone otherwise.
    request_tokens: of how many of the last tokens that convolution starts as the sum. 1 is the
        token alone; a request for k keys wants k (started with fewer, as an average or as a draw,
        two keys or more left no plateau), and a convolution of 3 even where k is 2: one of exactly
        two taps stayed at 0.
    """

    memory_decay: MemoryDecay = "none"
    memory_value: MemoryValue = "input"
    gate_init: float = 0.5
    straight_through: StraightThrough = "neighbour"
    router_init: RouterInit = "previous_token"
    selector_conv: int = 0
    request_tokens: int = 1

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            known, given = get_args(hints[field.name]), getattr(self, field.name)
            if known and given not in known:
                raise ValueError(f"{field.name} must be one of {', '.join(known)}, got {given!r}")
        if not 0 < self.gate_init < 1:
            raise ValueError(f"gate_init must lie between 0 and 1, got {self.gate_init}")
        if self.selector_conv < 0:
            raise ValueError(f"selector_conv must be a width or 0, got {self.selector_conv}")
        if not 1 <= self.request_tokens <= max(1, self.selector_conv):
            widths = f"{self.request_tokens} and a selector_conv of {self.selector_conv}"
            raise ValueError(f"request_tokens must be 1 or more and fit the taps, got {widths}")

    @classmethod
    def paper(cls) -> MemorySettings:
        """Return the settings as the paper's text has them."""
        return cls("backbone", "step", 0.1, "one_sided", "random", 0)

    @classmethod
    def named(cls, settings: MemorySettings | str) -> MemorySettings:
        """Return the settings of a name, "default" or "paper", or those that are given."""
        if isinstance(settings, MemorySettings):
            return settings
        if settings not in ("default", "paper"):
            raise ValueError(f"settings are default, paper or MemorySettings, got {settings!r}")
        return cls.paper() if settings == "paper" else cls()

    @property
    def gate_logit(self) -> float:
        """The bias of a sigmoid gate, to three digits: -2.197 for 0.1."""
        return round(math.log(self.gate_init / (1 - self.gate_init)), 3)
