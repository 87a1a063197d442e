"""SMat-Attention on a CPU, as C++."""
