"""The causal branch on a CPU, as C++."""
