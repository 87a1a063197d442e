"""Decode under a stepped window for very long, in fp32 beside fp64: arguments STEPS VC_DIM [gated].

`python -m tests.ops.smat.million_steps 1000000 2` prints the relative error of the last outputs,
the largest resident memory after a tenth of the steps and at the end, and the bytes of the state.
"""

import json
import resource
import sys
import warnings

import torch

import smat
from tests.ops.smat.comparison import make_inputs, mild_gates, relative_rms
from tests.ops.smat.decoding import decode, empty_for

BLOCK, WINDOW = 4096, 256


def run(num_steps, vc_dim, gated):
    """Take one token after the other in fp32, and the same tokens block by block in fp64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", smat.SMatWarning)
        mask = smat.SMatMask(4 * WINDOW, vc_dim, 16, boundary=smat.schedules.window(WINDOW))
    exact, rounded, peaks, error = None, None, [], None
    for start in range(0, num_steps, BLOCK):
        size = min(BLOCK, num_steps - start)
        single = make_inputs(size, batch=1, heads=1, dtype=torch.float32, seed=start)
        if gated:
            single["log_decay"] = mild_gates((1, size, 1), seed=start, strength=2e-4).float()
        double = {name: x.double() for name, x in single.items()}
        exact = empty_for(mask, double) if exact is None else exact
        rounded = empty_for(mask, single) if rounded is None else rounded
        with torch.no_grad():
            expected, exact = exact.extend(**double, inplace=True)
            found, rounded = decode(rounded, single)
        error = relative_rms(found, expected)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return {
        "steps": rounded.positions[0],
        "error": error,
        "peak_kb": [peaks[len(peaks) // 10], peaks[-1]],
        "state_bytes": sum(x.nbytes for x in rounded.tensors.values()),
    }


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), gated=len(sys.argv) > 3)))
