// One chunk of the causal branch as buffers: features of its keys and queries (equation 8).
#pragma once
#include "buffers.h"

// A chunk: its tokens, the windows that are open there, whether its queries see distant keys too.
struct Chunk {
    index_t start, stop, first_window, last_window, has_distant;
    index_t size() const { return stop - start; }
};

// What a call is given. G heads of queries share a key, or M heads of values share key and query.
template <class T> struct Call {
    Array<const T> q, k, v, key_gate, grad_out;
    Array<const double> log_decay;
    Array<T> out, normalizer, inverse, column, grad_q, grad_k, grad_v, grad_decay, grad_gate;
    const Chunk *chunks;
    const index_t *spans;  // the first chunk of each span, and the end: no window crosses it
    T *scratch;
    index_t num_spans, batch, key_heads, group, share, slices, key_dim, value_dim, chunk_size,
        num_slots, scratch_size, map, normalize, threads, part_q, part_k, part_gate,
        adds, heads_at_once, most_chunks;

    index_t head_blocks() const { return (key_heads + heads_at_once - 1) / heads_at_once; }
    index_t num_tasks() const { return num_spans * batch * head_blocks() * slices; }

    index_t width_k() const { return padded<T>(key_dim); }
    index_t width_v() const { return padded<T>(value_dim); }
    index_t width_c() const { return padded<T>(chunk_size); }
    index_t state_size() const {  // either way round, and a row for the normaliser
        const index_t most = std::max(key_dim, value_dim);
        return std::max(padded_rows(most), padded<T>(most)) * padded<T>(most) + padded<T>(most);
    }
};

// A task: some key heads of one sequence of the batch, or some of the heads that share one, and a
// span. Heads lie side by side in memory, and what lies side by side is worked off together.
struct Task {
    index_t batch, head_begin, head_end, key_head, first, last, begin, end, slice;
    template <class T> Task(const Call<T> &call, index_t number) {
        const index_t answers = std::max(call.group, call.share);
        slice = number % call.slices, number /= call.slices;
        first = slice * answers / call.slices, last = (slice + 1) * answers / call.slices;
        const index_t blocks = call.head_blocks();
        head_begin = number % blocks * call.heads_at_once, number /= blocks;
        head_end = std::min(head_begin + call.heads_at_once, call.key_heads);
        key_head = head_begin;
        batch = number % call.batch, number /= call.batch;
        begin = call.spans[number], end = call.spans[number + 1];
    }
    // Heads of queries, or of values, of the key head: all the task's, or the one there is.
    template <class T> std::pair<index_t, index_t> queries(const Call<T> &call) const {
        return call.group > 1 ? std::make_pair(first, last) : std::make_pair<index_t, index_t>(0, 1);
    }
    template <class T> std::pair<index_t, index_t> values(const Call<T> &call) const {
        return call.share > 1 ? std::make_pair(first, last) : std::make_pair<index_t, index_t>(0, 1);
    }
};

template <class T, int MAP>
inline void map_rows(const Array<const T> &from, index_t b, index_t head, index_t start, index_t rows,
                     index_t count, T *into, index_t width) {
    for (index_t i = 0; i < rows; ++i, into += width) {
        const T *x = from.at(b, start + i, head);
        for (index_t f = 0; f < count; f += LANES<T>)
            store(into + f, feature<T>(MAP, load_some(x + f, count - f)));
        if (count < width) clear(into + count, width - count);
    }
}
template <class T>
inline void load_features(int map, const Array<const T> &from, index_t b, index_t head, index_t start,
                          index_t rows, index_t count, T *into, index_t width) {
    const auto load = map == ELU ? map_rows<T, ELU> : map == RELU ? map_rows<T, RELU> : map_rows<T, IDENTITY>;
    load(from, b, head, start, rows, count, into, width);
}

// psi of a chunk: features of its keys, times their gate.
template <class T>
inline void load_keys(const Call<T> &call, index_t b, index_t head, const Chunk &chunk, T *psi) {
    const index_t width = call.width_k();
    load_features(call.map, call.k, b, head, chunk.start, chunk.size(), call.key_dim, psi, width);
    for (index_t j = 0; call.key_gate && j < chunk.size(); ++j)
        scale(psi + j * width, width, *call.key_gate.at(b, chunk.start + j, head));
}
