// The causal branch, backward (adjoint 12): states are found again, a block of chunks at a time.
//
// States and their adjoints are kept transposed, columns x features, with the normaliser's as one
// more row: so both are right-hand sides of products as they lie.
#include "chunk.h"

constexpr index_t BLOCK = 32;  // chunks whose states are kept at once

template <class T> struct Backward {
    const Call<T> &call;
    const index_t K, V, R, P, C, rows, num_blocks;
    T *psi, *psi_t, *v, *v_t, *phi, *pulled, *column, *scores, *grad_scores, *grad_phi, *grad_psi,
        *inter, *grad_v, *sums, *total_t, *by_query, *by_key, *columns, *states, *adjoints, *kept, *marks;
    Decay<T> decay;
    Buffers<T> buffers;

    Backward(const Call<T> &call, T *scratch)
        : call(call), K(call.key_dim), V(call.value_dim), R(call.width_k()), P(call.width_v()),
          C(call.width_c()), rows(std::max(padded_rows(C), C) + TILE_ROWS),
          num_blocks((call.most_chunks + BLOCK - 1) / BLOCK), buffers{scratch} {
        for (T **wide : {&psi, &phi, &grad_phi, &grad_psi, &inter}) *wide = buffers.take(rows * R);
        for (T **wide : {&v, &pulled, &grad_v}) *wide = buffers.take(rows * P);
        for (T **square : {&scores, &grad_scores}) *square = buffers.take(rows * C);
        for (T **line : {&column, &by_query, &by_key, &columns}) *line = buffers.take(rows);
        psi_t = buffers.take(R * C), v_t = buffers.take(P * C);
        sums = buffers.take(call.state_size()), total_t = buffers.take(R * (P + TILE_ROWS));
        const index_t heads = call.heads_at_once * call.num_slots * call.share * call.state_size();
        states = buffers.take(heads), adjoints = buffers.take(heads);
        kept = buffers.take(std::min(BLOCK, call.most_chunks) * heads);
        marks = buffers.take((num_blocks - 1) * heads);
        decay = Decay<T>(buffers, rows);
    }
    index_t heads_size() const {
        return call.heads_at_once * call.num_slots * call.share * call.state_size();
    }
    // The place of a window's state, or of its adjoint: padded_rows(V) x R, and a row behind V.
    index_t place(const Task &task, index_t window, index_t m) const {
        const index_t slot = (task.key_head - task.head_begin) * call.num_slots + window % call.num_slots;
        return (slot * call.share + m) * call.state_size();
    }
    index_t used() const { return padded_rows(V) * R + R; }
    T *key_sum(T *of) const { return of + padded_rows(V) * R; }

    void run(Task task) {
        const index_t size = heads_size(), last_block = (task.end - task.begin - 1) / BLOCK;
        for (index_t block = 0; block < last_block; ++block) {
            scan(task, block, nullptr);
            std::memcpy(marks + block * size, states, size * sizeof(T));
        }
        index_t closed = std::numeric_limits<index_t>::max();  // windows from here on have adjoints
        for (index_t block = last_block; block >= 0; --block) {
            if (block && block < last_block) std::memcpy(states, marks + (block - 1) * size, size * sizeof(T));
            scan(task, block, kept);
            const index_t begin = task.begin + block * BLOCK, end = std::min(begin + BLOCK, task.end);
            for (index_t number = end - 1; number >= begin; --number) {
                const Chunk &chunk = call.chunks[number];
                for (task.key_head = task.head_begin; task.key_head < task.head_end; ++task.key_head)
                    pull(task, chunk, kept + (number - begin) * size, chunk.first_window < closed);
                closed = std::min(closed, chunk.first_window);
            }
        }
    }

    // Carry states over a block; note those before each chunk, if there is room for them.
    void scan(Task task, index_t block, T *notes) {
        const index_t begin = task.begin + block * BLOCK, end = std::min(begin + BLOCK, task.end);
        index_t opened = call.chunks[begin].first_window;
        if (block) opened = call.chunks[begin - 1].last_window + 1;
        for (index_t number = begin; number < end; ++number) {
            const Chunk &chunk = call.chunks[number];
            const auto [first, last] = task.values(call);
            for (task.key_head = task.head_begin; task.key_head < task.head_end; ++task.key_head) {
                for (index_t window = opened; window <= chunk.last_window; ++window)
                    for (index_t m = first; m < last; ++m)
                        clear(states + place(task, window, m), call.state_size());
                for (index_t window = chunk.first_window; notes && window <= chunk.last_window; ++window)
                    for (index_t m = first; m < last; ++m)
                        std::memcpy(notes + (number - begin) * heads_size() + place(task, window, m),
                                    states + place(task, window, m), used() * sizeof(T));
                const bool goes_on = number + 1 < task.end && !(notes && number + 1 == end);
                if (goes_on) pass(task, chunk, call.chunks[number + 1].first_window);
            }
            opened = chunk.last_window + 1;
        }
    }

    void pass(const Task &task, const Chunk &chunk, index_t first_window) {
        load_keys(call, task.batch, task.key_head, chunk, psi);
        const auto [first, last] = task.values(call);
        for (index_t m = first; m < last; ++m) {
            load_values(task, chunk, m);
            for (index_t j = 0; call.log_decay && j < chunk.size(); ++j) scale(v + j * P, P, decay.until[j]);
            clear(sums, used());
            product<T, true>(padded_rows(V), R, chunk.size(), v, 1, P, psi, R, sums, R);
            for (index_t j = 0; call.normalize && j < chunk.size(); ++j)
                add_to(key_sum(sums), psi + j * R, R, call.log_decay ? decay.until[j] : T(1));
            for (index_t window = first_window; window <= chunk.last_window; ++window) {
                T *state = states + place(task, window, m);
                if (call.log_decay) scale(state, used(), decay.over);
                add_to(state, sums, used(), T(1));
            }
        }
    }

    void load_values(const Task &task, const Chunk &chunk, index_t m) {
        const index_t head = task.key_head * call.share + m;
        load_rows(call.v, task.batch, head, chunk.start, chunk.size(), V, v, P);
        if (call.log_decay) decay.fill(call.log_decay, task.batch, head, chunk.start, chunk.size());
    }

    // Find the gradients of a chunk, and bring the adjoints of its windows in front of it.
    void pull(const Task &task, const Chunk &chunk, T *before, bool is_new) {
        const index_t size = chunk.size();
        load_keys(call, task.batch, task.key_head, chunk, psi);
        transpose(size, R, psi, R, psi_t, C);
        const auto [first, last] = task.values(call);
        const auto [q_first, q_last] = task.queries(call);
        for (index_t m = first; m < last; ++m) {
            T *own = adjoints + place(task, chunk.first_window, m);
            if (is_new) clear(own, call.state_size());
            load_values(task, chunk, m);
            transpose(size, P, v, P, v_t, C);
            const T passing = pull_keys(task, chunk, m, before);
            if (m == first) std::swap(inter, grad_psi);
            else add_to(grad_psi, inter, size * R, T(1));
            clear(by_query, size), clear(columns, C);
            for (index_t g = q_first; g < q_last; ++g) {
                if (m == first) clear(grad_phi, size * R);
                pull_queries(task, chunk, g, m, before + place(task, chunk.first_window, m), own);
                if (m + 1 == last) write_queries(task, chunk, g);
            }
            write_values(task, chunk, m, passing);
        }
        write_keys(task, chunk);
    }

    // What later queries ask of the chunk's keys and values; the part that passes it.
    T pull_keys(const Task &task, const Chunk &chunk, index_t m, const T *before) {
        const index_t size = chunk.size(), full = padded_rows(size);
        T *total = adjoints + place(task, chunk.first_window, m);
        if (chunk.last_window > chunk.first_window) {
            std::memcpy(sums, total, used() * sizeof(T));
            for (index_t window = chunk.first_window + 1; window <= chunk.last_window; ++window)
                add_to(sums, adjoints + place(task, window, m), used(), T(1));
            total = sums;
        }
        transpose(V, R, total, R, total_t, P);
        product<T, false>(full, P, K, psi, R, 1, total_t, P, grad_v, P);
        product<T, false>(full, R, V, v, P, 1, total, R, inter, R);
        for (index_t j = 0; j < size; ++j) {
            if (call.normalize) add_to(inter + j * R, key_sum(total), R, T(1));
            if (!call.log_decay) continue;
            scale(inter + j * R, R, decay.until[j]);
            scale(grad_v + j * P, P, decay.until[j]);
            by_key[j] = sum<T>(dot(inter + j * R, psi + j * R, R));
        }
        vec<T> passing{};
        for (index_t window = chunk.first_window; call.log_decay && window <= chunk.last_window; ++window) {
            T *adjoint = adjoints + place(task, window, m);
            const T *state = before + place(task, window, m);
            passing += dot(state, adjoint, V * R) * decay.over;
            if (call.normalize) passing += dot(state + padded_rows(V) * R, key_sum(adjoint), R) * decay.over;
            scale(adjoint, used(), decay.over);
        }
        return sum<T>(passing);
    }

    // One head of queries: its own gradients, and what it asks of the chunk and of its window.
    void pull_queries(const Task &task, const Chunk &chunk, index_t g, index_t m, T *state, T *own) {
        const index_t size = chunk.size(), query_head = task.key_head * call.group + g;
        load_features(call.map, call.q, task.batch, query_head, chunk.start, size, K, phi, R);
        divide(task.batch, chunk, query_head * call.share + m);
        for (index_t row = 0; row < size; row += TILE_ROWS) {
            const index_t end = std::min(row + TILE_ROWS, size), wide = padded<T>(end);
            product<T, false>(TILE_ROWS, wide, K, phi + row * R, R, 1, psi_t, C, scores + row * C, C);
            product<T, false>(TILE_ROWS, wide, V, pulled + row * P, P, 1, v_t, C, grad_scores + row * C, C);
            product<T, false>(TILE_ROWS, R, V, pulled + row * P, P, 1, state, R, inter + row * R, R);
            for (index_t i = row; i < end; ++i) weigh(i, wide, key_sum(state));
            product<T, true>(TILE_ROWS, R, end, grad_scores + row * C, C, 1, psi, R, inter + row * R, R);
        }
        add_to(grad_phi, inter, size * R, T(1));
        for (index_t key = 0; key < size; key += TILE_ROWS) {
            const index_t corner = key * C + key, later = size - key;
            product<T, true>(TILE_ROWS, P, later, scores + corner, 1, C, pulled + key * P, P, grad_v + key * P, P);
            product<T, true>(TILE_ROWS, R, later, grad_scores + corner, 1, C, phi + key * R, R, grad_psi + key * R, R);
        }
        for (index_t i = 0; i < size; ++i) {
            const T since = call.log_decay ? decay.since[i] : T(1);
            if (call.log_decay) scale(pulled + i * P, P, since);
            if (call.normalize) add_to(key_sum(own), phi + i * R, R, column[i] * since);
        }
        product<T, true>(padded_rows(V), R, size, pulled, 1, P, phi, R, own, R);
    }

    // Gradients of the numerator, g / s, and of the normaliser, -(g . o) / s, at one head's answers.
    void divide(index_t b, const Chunk &chunk, index_t head) {
        load_rows(call.grad_out, b, head, chunk.start, chunk.size(), V, pulled, P);
        for (index_t i = 0; i < chunk.size(); ++i) {
            column[i] = 0;
            if (!call.normalize) continue;
            const T total = *call.normalizer.at(b, chunk.start + i, head);
            const T *out = call.out.at(b, chunk.start + i, head);
            const T inverse = std::abs(total) < std::numeric_limits<T>::min() ? T(0) : 1 / total;
            scale(pulled + i * P, P, inverse);
            vec<T> product{};
            for (index_t j = 0; j < V; j += LANES<T>) product += load(pulled + i * P + j) * load_some(out + j, V - j);
            *call.inverse.at(b, chunk.start + i, head) = inverse;
            *call.column.at(b, chunk.start + i, head) = column[i] = -sum<T>(product);
        }
    }

    // Finish a row of scores and of their gradients; sum up what its gates take part in.
    void weigh(index_t i, index_t wide, const T *keys) {
        if (call.normalize) add_to(inter + i * R, keys, R, column[i]);
        vec<T> pairs{};
        for (index_t j = 0; j < wide; j += LANES<T>) {
            T *score = scores + i * C + j, *grad = grad_scores + i * C + j;
            vec<T> weight = load(score), pulls = load(grad) + column[i];
            if (call.log_decay) {
                const vec<T> left = decay.between(i, j), pair = until_column<T>(weight * pulls * left, j, i - 1);
                pairs += pair;
                store(columns + j, load(columns + j) + pair);
                weight *= left, pulls *= left;
            }
            store(score, until_column<T>(weight, j, i));
            store(grad, until_column<T>(pulls, j, i));
        }
        if (!call.log_decay) return;
        scale(inter + i * R, R, decay.since[i]);
        by_query[i] += sum<T>(pairs + dot(inter + i * R, phi + i * R, R));
    }

    // Take gradients of features through the map.
    void write_row(T *into, const T *grad, const T *value, T factor) {
        for (index_t f = 0; f < K; f += LANES<T>)
            store_some(into + f, load(grad + f) * feature_slope<T>(call.map, load(value + f)) * factor, K - f);
    }
    void write_queries(const Task &task, const Chunk &chunk, index_t g) {
        for (index_t i = 0; i < chunk.size(); ++i) {
            T *into = call.grad_q.at(task.batch, chunk.start + i, task.key_head * call.group + g);
            write_row(into + task.slice * call.part_q, grad_phi + i * R, phi + i * R, T(1));
        }
    }
    void write_keys(const Task &task, const Chunk &chunk) {
        if (call.key_gate)  // the features alone
            load_features(call.map, call.k, task.batch, task.key_head, chunk.start, chunk.size(), K, psi, R);
        for (index_t j = 0; j < chunk.size(); ++j) {
            T gate = 1;
            if (call.key_gate) {
                gate = *call.key_gate.at(task.batch, chunk.start + j, task.key_head);
                T *into = call.grad_gate.at(task.batch, chunk.start + j, task.key_head);
                into[task.slice * call.part_gate] = sum<T>(dot(psi + j * R, grad_psi + j * R, R));
            }
            T *into = call.grad_k.at(task.batch, chunk.start + j, task.key_head);
            write_row(into + task.slice * call.part_k, grad_psi + j * R, psi + j * R, gate);
        }
    }
    // A gate is moved by every pair of a key before it and a query not before it.
    void write_values(const Task &task, const Chunk &chunk, index_t m, T passing) {
        const index_t head = task.key_head * call.share + m;
        T earlier = 0, later = 0;
        for (index_t j = 0; j < chunk.size(); ++j) {
            T *into = call.grad_v.at(task.batch, chunk.start + j, head);
            for (index_t f = 0; f < V; f += LANES<T>) store_some(into + f, load(grad_v + j * P + f), V - f);
            if (!call.log_decay) continue;
            *call.grad_decay.at(task.batch, chunk.start + j, head) = earlier + passing;
            earlier += by_key[j];
        }
        for (index_t i = chunk.size() - 1; call.log_decay && i >= 0; --i) {
            later += by_query[i] - columns[i];
            *call.grad_decay.at(task.batch, chunk.start + i, head) += later;
        }
    }
};

template <class T> void attend_backward(const Call<T> &call) {
    in_threads(call.num_tasks(), call.threads, [&](index_t number, index_t thread) {
        Backward<T>(call, call.scratch + thread * call.scratch_size).run(Task(call, number));
    }, bool(call.log_decay));
}
extern "C" {
void attend_backward_float32(const Call<float> *call) { attend_backward(*call); }
void attend_backward_float64(const Call<double> *call) { attend_backward(*call); }
index_t scratch_float32(const Call<float> *call) { return Backward<float>(*call, nullptr).buffers.used; }
index_t scratch_float64(const Call<double> *call) { return Backward<double>(*call, nullptr).buffers.used; }
}
