// One chunk of the gated delta rule: what its tokens write, and what of it they read.
//
//     e_i = v_i - since_i S_0' k_i - sum over j < i of overlap_ij u_j,   u_i = beta_i e_i,
//     y_i = since_i S_0' q_i + sum over j <= i of reads_ij u_j,   S_c = over S_0 + sum until_j k_j u_j',
//
// with overlap_ij = (k_i . k_j) and reads_ij = (q_i . k_j), both times what gates leave of j at i.
// The sums e_i are found one after the other, a tile of rows at a time: no inverse is formed.
#pragma once
#include "buffers.h"

// What a call is given; states (B, H, K, V) and kept (blocks, B, H, K, V) lie without gaps.
template <class T> struct Call {
    Array<const T> q, k, v, beta, grad_out;
    Array<const double> log_decay;
    Array<T> out, grad_q, grad_k, grad_v, grad_beta, grad_decay;
    const T *first;  // the state before the first token, or the gradient of the one after the last
    T *last, *kept;  // the state after the last token, or the gradient of the first; before each block
    T *scratch;
    double scale;
    index_t batch, length, heads, key_dim, value_dim, block_size, chunk_size, scratch_size, threads,
        heads_at_once;

    index_t num_blocks() const { return (length + block_size - 1) / block_size; }
    index_t width_k() const { return padded<T>(key_dim); }
    index_t width_v() const { return padded<T>(value_dim); }
    index_t width_c() const { return padded<T>(chunk_size); }
    index_t rows() const { return std::max(padded_rows(width_c()), width_c()) + TILE_ROWS; }
    index_t state_size() const { return std::max(padded_rows(key_dim), width_k()) * width_v(); }
    index_t place(index_t b, index_t head, index_t block = 0) const {
        return ((block * batch + b) * heads + head) * key_dim * value_dim;
    }
    index_t head_blocks() const { return (heads + heads_at_once - 1) / heads_at_once; }
};

// A task: some heads of one sequence. They lie side by side in memory, and are worked off together.
struct Task {
    index_t b, begin, end;
    template <class T> Task(const Call<T> &call, index_t number) : b(number / call.head_blocks()) {
        begin = number % call.head_blocks() * call.heads_at_once;
        end = std::min(begin + call.heads_at_once, call.heads);
    }
};

// States between a caller's layout and one with padded rows.
template <class T> inline void load_state(const Call<T> &call, const T *from, T *into) {
    clear(into, call.state_size());
    for (index_t i = 0; i < call.key_dim; ++i)
        std::memcpy(into + i * call.width_v(), from + i * call.value_dim, call.value_dim * sizeof(T));
}
template <class T> inline void save_state(const Call<T> &call, const T *from, T *into) {
    for (index_t i = 0; i < call.key_dim; ++i)
        std::memcpy(into + i * call.value_dim, from + i * call.width_v(), call.value_dim * sizeof(T));
}

// Rows of a chunk, and rows of 0 up to a whole tile.
template <class T>
inline void load_tile(const Array<const T> &from, index_t b, index_t head, index_t start, index_t size,
                      index_t count, T *into, index_t width) {
    load_rows(from, b, head, start, size, count, into, width);
    clear(into + size * width, (padded_rows(size) - size) * width);
}

template <class T> inline void store_row(const T *from, T *into, index_t count) {
    std::memcpy(into, from, count * sizeof(T));
}

template <class T> struct ChunkTiles {
    const Call<T> &call;
    const index_t K, V, R, P, C;  // features, columns, and both and a chunk padded
    T *k, *q, *error, *update, *moved, *overlap, *reads, *beta, *before;  // overlap times -1
    Decay<T> decay;
    index_t start = 0, size = 0;

    ChunkTiles(const Call<T> &call, Buffers<T> &buffers)
        : call(call), K(call.key_dim), V(call.value_dim), R(call.width_k()), P(call.width_v()),
          C(call.width_c()), decay(buffers, call.rows()) {
        for (T **wide : {&k, &q}) *wide = buffers.take(call.rows() * R);
        for (T **wide : {&error, &update, &moved}) *wide = buffers.take(call.rows() * P);
        for (T **square : {&overlap, &reads}) *square = buffers.take(call.rows() * C);
        beta = buffers.take(call.rows());
        before = buffers.take(call.state_size());
    }

    // Load a chunk whose state before it is in its place; the one at `next` will follow. k_t is scratch.
    void fill(index_t b, index_t head, index_t first, index_t count, index_t next, T *k_t) {
        start = first, size = count;
        load_tile(call.k, b, head, start, size, K, k, R);
        load_tile(call.q, b, head, start, size, K, q, R);
        scale(q, size * R, T(call.scale));
        decay.fill(call.log_decay, b, head, start, size);
        for (index_t i = 0; i < padded_rows(size); ++i)
            beta[i] = i < size ? *call.beta.at(b, start + i, head) : T(0);
        transpose(size, R, k, R, k_t, C);
        for (index_t row = 0; row < size; row += TILE_ROWS) {
            const index_t end = std::min(row + TILE_ROWS, size), wide = padded<T>(end);
            foresee<false>(call.k, b, head, next + row, K);
            foresee<false>(call.q, b, head, next + row, K);
            if (call.v) foresee<false>(call.v, b, head, next + row, V);
            product<T, false>(TILE_ROWS, wide, K, k + row * R, R, 1, k_t, C, overlap + row * C, C);
            product<T, false>(TILE_ROWS, wide, K, q + row * R, R, 1, k_t, C, reads + row * C, C);
            for (index_t i = row; i < end; ++i) weigh(i, wide);
        }
        product<T, false>(padded_rows(size), P, K, k, R, 1, before, P, error, P);
        for (index_t i = 0; i < size; ++i) {
            const T *value = call.v ? call.v.at(b, start + i, head) : nullptr;
            for (index_t j = 0; j < V; j += LANES<T>) {
                const vec<T> told = value ? load_some(value + j, V - j) : vec<T>{};
                store(error + i * P + j, told - load(error + i * P + j) * decay.since[i]);
            }
        }
        substitute();
        for (index_t j = 0; j < size; ++j) {
            const T left = decay.until[j];
            for (index_t f = j * P; f < (j + 1) * P; f += LANES<T>) store(moved + f, load(update + f) * left);
        }
    }

    // Ask for a tile of rows before it is needed, as far as there are tokens.
    template <bool WRITE, class A>
    void foresee(const A &from, index_t b, index_t head, index_t at, index_t count) const {
        const index_t rows = std::min<index_t>(TILE_ROWS, call.length - at);
        if (at >= 0) prefetch<WRITE>(from, b, head, at, rows, count);
    }

    void weigh(index_t i, index_t wide) {
        for (index_t j = 0; j < wide; j += LANES<T>) {
            const vec<T> left = decay.between(i, j);
            T *written = overlap + i * C + j, *read = reads + i * C + j;
            store(written, until_column<T>(-load(written) * left, j, i - 1));
            store(read, until_column<T>(load(read) * left, j, i));
        }
    }

    // Take off every token's error what earlier tokens of the chunk have written.
    void substitute() {
        for (index_t row = 0; row < size; row += TILE_ROWS) {
            product<T, true>(TILE_ROWS, P, row, overlap + row * C, C, 1, update, P, error + row * P, P);
            for (index_t j = 0; j < P; j += LANES<T>) {
                vec<T> above[TILE_ROWS];
#pragma GCC unroll 8
                for (int i = 0; i < TILE_ROWS; ++i) {
                    const index_t at = (row + i) * P + j;
                    vec<T> sum = load(error + at);
#pragma GCC unroll 8
                    for (int n = 0; n < i; ++n) sum += overlap[(row + i) * C + row + n] * above[n];
                    store(error + at, sum);
                    store(update + at, above[i] = beta[row + i] * sum);
                }
            }
        }
    }

    // The adjoint: what later tokens ask of an update goes to it, and on to errors, from the last.
    void substitute_backward(T *grad_update, T *grad_error) const {
        for (index_t row = padded_rows(size) - TILE_ROWS; row >= 0; row -= TILE_ROWS) {
            const index_t after = row + TILE_ROWS, later = std::max<index_t>(0, size - after);
            product<T, true>(TILE_ROWS, P, later, overlap + after * C + row, 1, C, grad_error + after * P, P,
                             grad_update + row * P, P);
            for (index_t j = 0; j < P; j += LANES<T>) {
                vec<T> below[TILE_ROWS];
#pragma GCC unroll 8
                for (int i = TILE_ROWS - 1; i >= 0; --i) {
                    const index_t at = (row + i) * P + j;
                    vec<T> sum = load(grad_update + at);
#pragma GCC unroll 8
                    for (int n = TILE_ROWS - 1; n > i; --n) sum += overlap[(row + n) * C + row + i] * below[n];
                    store(grad_update + at, sum);
                    store(grad_error + at, below[i] = row + i < size ? beta[row + i] * sum : vec<T>{});
                }
            }
        }
    }

    // Carry a state over the chunk.
    void pass(T *state) const {
        scale(state, padded_rows(K) * P, decay.over);
        product<T, true>(padded_rows(K), P, size, k, 1, R, moved, P, state, P);
    }
};
