"""The gated delta rule on a CPU, as C++."""
