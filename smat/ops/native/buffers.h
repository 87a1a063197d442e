// Rows of numbers in buffers, and what gates leave of them within a chunk.
#pragma once
#include "tiles.h"

// Buffers one behind the other, each on a cache line of its own; without memory, their size alone.
template <class T> struct Buffers {
    T *memory;
    index_t used = 0;
    T *take(index_t count) {
        T *mine = memory ? memory + used : nullptr;
        used += round_up(count, 64);
        return mine;
    }
};

template <class T> inline void clear(T *x, index_t count) { std::memset(x, 0, count * sizeof(T)); }
template <class T> inline void scale(T *x, index_t count, T factor) {
    for (index_t i = 0; i < count; i += LANES<T>) store(x + i, load(x + i) * factor);
}
template <class T> inline void add_to(T *x, const T *y, index_t count, T factor) {
    for (index_t i = 0; i < count; i += LANES<T>) store(x + i, load(x + i) + load(y + i) * factor);
}
template <class T> inline vec<T> dot(const T *x, const T *y, index_t count) {
    vec<T> total{};
    for (index_t i = 0; i < count; i += LANES<T>) total += load(x + i) * load(y + i);
    return total;
}

// Copy rows into a buffer whose rows are padded with 0.
template <class T>
inline void load_rows(const Array<const T> &from, index_t b, index_t head, index_t start, index_t rows,
                      index_t count, T *into, index_t width) {
    for (index_t i = 0; i < rows; ++i) {
        const T *x = from.at(b, start + i, head);
        for (index_t f = 0; f < count; f += LANES<T>) store(into + i * width + f, load_some(x + f, count - f));
    }
}

// What is left within a chunk. Sums of gates are kept as two numbers, so that differences of large
// ones have all their digits, and only differences are exponentiated (lemma "Gated SMat").
template <class T> struct Decay {
    T *coarse, *fine, *since, *until;  // sums at each token; left of the state before, of each key
    T over = 1;                        // left of what passes the chunk

    Decay() = default;
    Decay(Buffers<T> &buffers, index_t size)
        : coarse(buffers.take(size)), fine(buffers.take(size)), since(buffers.take(size)),
          until(buffers.take(size)) {}
    void fill(const Array<const double> &gates, index_t b, index_t head, index_t start, index_t size) {
        double total = 0, lost = 0, totals[256], losses[256];
        for (index_t i = 0; i < size; ++i) {
            const double gate = *gates.at(b, start + i, head), before = total;
            total += gate;
            const double rounded = total - before;
            lost += (before - (total - rounded)) + (gate - rounded);
            totals[i] = total, losses[i] = lost;
        }
        for (index_t i = 0; i < size; ++i) {
            const double sum = totals[i] + losses[i];
            coarse[i] = sizeof(T) == 8 ? T(totals[i]) : T(sum);
            fine[i] = sizeof(T) == 8 ? T(losses[i]) : T(sum - double(coarse[i]));
            since[i] = exp_or_zero_of<T>(sum);
            until[i] = exp_or_zero_of<T>((total - totals[i]) + (lost - losses[i]));
        }
        over = exp_or_zero_of<T>(total + lost);
    }
    // What is left of some keys at a query.
    vec<T> between(index_t query, index_t key) const {
        return exp_or_zero<T>((coarse[query] - load(coarse + key)) + (fine[query] - load(fine + key)));
    }
};

// Keep the entries of a row up to its own token.
template <class T> inline vec<T> until_column(vec<T> x, index_t first, index_t last) {
    using integer = typename Vectors<T>::integer;
    return numbered<T>() <= integer(last - first) ? x : vec<T>{};
}
