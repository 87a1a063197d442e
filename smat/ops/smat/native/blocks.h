// Pool and read one block of states: as many features as a vector has columns, for all entries.
//
// A block is a tile for each feature, a vector of columns for each entry. Visits of tokens are
// sorted by the entry that they write or read, and their vectors lie in that order.
#pragma once
#include "tiles.h"

constexpr index_t PIECE = 128;  // visits that are summed before they go to a table

// Visits of one fold, entry by entry: run i has visits begin[i] .. begin[i + 1] of entry[i].
struct Runs {
    const int32_t *entry, *begin;
    index_t count;
};

template <class T> struct Block {
    T *tiles;
    index_t num_entries, num_features;

    T *at(index_t feature, index_t entry) const {
        return tiles + (feature * num_entries + entry) * LANES<T>;
    }
    void fill(index_t from, index_t to) const {
        for (index_t i = 0; i < num_features; ++i) std::fill(at(i, from), at(i, to), T(0));
    }
    void scale(T factor) const {
        const index_t size = num_features * num_entries * LANES<T>;
        for (index_t i = 0; i < size; i += LANES<T>) store(tiles + i, load(tiles + i) * factor);
    }
};

// Transpose as many vectors as each has columns, in registers.
template <class T> inline void transpose_tile(vec<T> *x) {
    constexpr int N = LANES<T>;
#if defined(__clang__)
    T from[N * N], to[N * N];
    for (int i = 0; i < N; ++i) store(from + i * N, x[i]);
    transpose(N, N, from, N, to, N);
    for (int i = 0; i < N; ++i) x[i] = load(to + i * N);
#else
    using Bits = typename Vectors<T>::bits;
#pragma GCC unroll 4
    for (int step = 1; step < N; step *= 2) {
        Bits low, high;
        for (int lane = 0; lane < N; ++lane) {
            low[lane] = lane & step ? N + lane - step : lane;
            high[lane] = lane & step ? N + lane : lane + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            if (i & step) continue;
            const vec<T> a = x[i], b = x[i + step];
            x[i] = __builtin_shuffle(a, b, low);
            x[i + step] = __builtin_shuffle(a, b, high);
        }
    }
#endif
}

// table[feature][entry] = or += sum over visits of left[visit][feature] right[visit].
template <class T>
void pool(const Runs &runs, const T *left, const T *right, const Block<T> &table, bool fresh) {
    constexpr int N = LANES<T>;
    index_t filled = 0;
    for (index_t run = 0; run < runs.count; ++run) {
        const index_t entry = runs.entry[run], end = runs.begin[run + 1];
        if (fresh) table.fill(filled, entry), filled = entry + 1;
        bool add = !fresh;
        for (index_t at = runs.begin[run]; at < end; add = true) {
            vec<T> sums[N] = {};
            for (const index_t stop = std::min(at + PIECE, end); at < stop; ++at) {
                const vec<T> row = load(right + at * N);
                const T *coefficient = left + at * N;
#pragma GCC unroll 16
                for (int i = 0; i < N; ++i) sums[i] += coefficient[i] * row;
            }
#pragma GCC unroll 16
            for (int i = 0; i < N; ++i) {
                if (i >= table.num_features) break;
                T *to = table.at(i, entry);
                store(to, add ? load(to) + sums[i] : sums[i]);
            }
        }
    }
    if (fresh) table.fill(filled, table.num_entries);
}

// answer[visit] = or += sum over features of left[visit][feature] table[feature][entry], and with
// TRANSPOSED the sum over columns of left[visit][column] table[.][entry][column].
template <class T, bool TRANSPOSED>
void read(const Runs &runs, const T *left, const Block<T> &table, T *answer, bool add) {
    constexpr int N = LANES<T>;
    for (index_t run = 0; run < runs.count; ++run) {
        vec<T> state[N];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i)
            state[i] = i < table.num_features ? load(table.at(i, runs.entry[run])) : vec<T>{};
        if (TRANSPOSED) transpose_tile<T>(state);
        for (index_t at = runs.begin[run]; at < runs.begin[run + 1]; ++at) {
            const T *coefficient = left + at * N;
            vec<T> even = add ? load(answer + at * N) : vec<T>{}, odd{};
#pragma GCC unroll 16
            for (int i = 0; i < N; i += 2) {
                even += coefficient[i] * state[i];
                odd += coefficient[i + 1] * state[i + 1];
            }
            store(answer + at * N, even + odd);
        }
    }
}

// The column of ones has states of one number a feature: a single tile, features along its vectors.
// table[entry] = or += sum over visits of scale[visit] left[visit]; without a scale it is 1.
template <class T>
void pool_ones(const Runs &runs, const T *left, const T *scale, const Block<T> &table, bool fresh) {
    if (fresh) table.fill(0, table.num_entries);
    for (index_t run = 0; run < runs.count; ++run) {
        const index_t end = runs.begin[run + 1];
        for (index_t at = runs.begin[run]; at < end;) {
            vec<T> sum{};
            for (const index_t stop = std::min(at + PIECE, end); at < stop; ++at)
                sum += (scale ? scale[at] : T(1)) * load(left + at * LANES<T>);
            T *to = table.at(0, runs.entry[run]);
            store(to, load(to) + sum);
        }
    }
}

// answer[visit] = or += left[visit] . table[entry], a number.
template <class T>
void read_ones(const Runs &runs, const T *left, const Block<T> &table, T *answer, bool add) {
    for (index_t run = 0; run < runs.count; ++run) {
        const vec<T> state = load(table.at(0, runs.entry[run]));
        for (index_t at = runs.begin[run]; at < runs.begin[run + 1]; ++at)
            answer[at] = sum<T>(load(left + at * LANES<T>) * state) + (add ? answer[at] : T(0));
    }
}

// answer[visit] += scale[visit] table[entry]: the adjoint; without a scale it is 1.
template <class T>
void spread_ones(const Runs &runs, const T *scale, const Block<T> &table, T *answer) {
    for (index_t run = 0; run < runs.count; ++run) {
        const vec<T> state = load(table.at(0, runs.entry[run]));
        for (index_t at = runs.begin[run]; at < runs.begin[run + 1]; ++at) {
            T *to = answer + at * LANES<T>;
            store(to, load(to) + (scale ? scale[at] : T(1)) * state);
        }
    }
}
