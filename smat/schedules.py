"""Where the line between distant and recent keys runs: the boundary of a mask.

>>> from smat import SMatMask, schedules
>>> SMatMask(1024, vc_dim=3, boundary=schedules.window(256)).describe()
'SMatMask: T = 1024, d = 3, q = 11, n = 512, c = 64, boundary = window(step=256)'

`none()`: no key is ever distant. `kept(n)`: the first n keys, for ever. `rebuilt()`: half of
whatever length the mask is built for, the default. `doubling()`: the boundary doubles at each power
of two. `window(step)`: the recent window advances by `step` keys at a time and has no horizon.
"""

from smat.masks.boundary import doubling, kept, none, rebuilt, window

__all__ = ["doubling", "kept", "none", "rebuilt", "window"]
