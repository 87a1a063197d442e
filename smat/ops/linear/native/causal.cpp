// The causal branch, forward: chunk after chunk, with the states of open windows (equation 8).
#include "chunk.h"

template <class T> struct Forward {
    const Call<T> &call;
    const index_t K, V, R, P, C;  // features, columns, and both and a chunk padded
    T *psi, *psi_t, *v, *phi, *scores, *weighted, *y, *sums, *states;
    std::vector<Decay<T>> decays;
    Buffers<T> buffers;

    Forward(const Call<T> &call, T *scratch)
        : call(call), K(call.key_dim), V(call.value_dim), R(call.width_k()), P(call.width_v()),
          C(call.width_c()), buffers{scratch} {
        psi = buffers.take(C * R + TILE_ROWS);
        psi_t = buffers.take(R * C);
        v = buffers.take(call.share * C * P);
        phi = buffers.take(TILE_ROWS * R);
        scores = buffers.take(TILE_ROWS * C);
        weighted = buffers.take(TILE_ROWS * C);
        y = buffers.take(TILE_ROWS * P);
        sums = buffers.take(call.state_size());
        states = buffers.take(call.heads_at_once * call.num_slots * call.share * call.state_size());
        if (call.log_decay)
            for (index_t m = 0; m < call.share; ++m) decays.emplace_back(buffers, C);
    }
    // The state of a window, padded_rows(K) x P, and behind it the sum of its keys.
    T *state(const Task &task, index_t window, index_t m) const {
        const index_t slot = (task.key_head - task.head_begin) * call.num_slots + window % call.num_slots;
        return states + (slot * call.share + m) * call.state_size();
    }
    T *key_sum(T *of) const { return of + padded_rows(K) * P; }

    void run(Task task) {
        index_t opened = call.chunks[task.begin].first_window;
        for (index_t number = task.begin; number < task.end; ++number) {
            const Chunk &chunk = call.chunks[number];
            for (task.key_head = task.head_begin; task.key_head < task.head_end; ++task.key_head)
                work_off(task, chunk, number + 1 < task.end ? &chunk + 1 : nullptr, opened);
            opened = chunk.last_window + 1;
        }
    }

    // Answer the queries of one key head, and carry its windows over the chunk.
    void work_off(const Task &task, const Chunk &chunk, const Chunk *next, index_t opened) {
        const auto [first, last] = task.values(call);
        for (index_t window = opened; window <= chunk.last_window; ++window)
            for (index_t m = first; m < last; ++m) clear(state(task, window, m), call.state_size());
        load_chunk(task, chunk);
        const auto [q_first, q_last] = task.queries(call);
        for (index_t g = q_first; g < q_last; ++g)
            for (index_t row = 0; row < chunk.size(); row += TILE_ROWS) {
                foresee(task, chunk, g, row, call.chunks[task.end - 1].stop);
                answer(task, chunk, g, row);
            }
        if (next) pass(task, chunk, next->first_window);
    }

    // Ask for what the same rows of the next chunk will read, and for where this one will write.
    void foresee(const Task &task, const Chunk &chunk, index_t g, index_t row, index_t end) {
        const index_t rows = std::min<index_t>(TILE_ROWS, chunk.size() - row), here = chunk.start + row;
        const index_t next = chunk.stop + row, left = std::max<index_t>(0, std::min(rows, end - next));
        const index_t head = task.key_head * call.group + g;
        prefetch<false>(call.q, task.batch, head, next, left, K);
        if (g == task.queries(call).first)
            prefetch<false>(call.k, task.batch, task.key_head, next, left, K);
        const auto [first, last] = task.values(call);
        for (index_t m = first; m < last; ++m) {
            prefetch<true>(call.out, task.batch, head * call.share + m, here, rows, V);
            if (g == task.queries(call).first)
                prefetch<false>(call.v, task.batch, task.key_head * call.share + m, next, left, V);
        }
    }

    void load_chunk(const Task &task, const Chunk &chunk) {
        const index_t size = chunk.size();
        load_keys(call, task.batch, task.key_head, chunk, psi);
        transpose(size, R, psi, R, psi_t, C);
        const auto [first, last] = task.values(call);
        for (index_t m = first; m < last; ++m) {
            const index_t head = task.key_head * call.share + m;
            load_rows(call.v, task.batch, head, chunk.start, size, V, v + m * C * P, P);
            if (call.log_decay) decays[m].fill(call.log_decay, task.batch, head, chunk.start, size);
        }
    }

    // Answer TILE_ROWS queries of one head.
    void answer(const Task &task, const Chunk &chunk, index_t g, index_t row) {
        const index_t rows = std::min<index_t>(TILE_ROWS, chunk.size() - row), keys = row + rows;
        load_features(call.map, call.q, task.batch, task.key_head * call.group + g, chunk.start + row,
                      rows, K, phi, R);
        product<T, false>(TILE_ROWS, padded<T>(keys), K, phi, R, 1, psi_t, C, scores, C);
        const auto [first, last] = task.values(call);
        for (index_t m = first; m < last; ++m) {
            const T *before = state(task, chunk.first_window, m);
            product<T, false>(TILE_ROWS, P, K, phi, R, 1, before, P, y, P);
            T totals[TILE_ROWS];
            for (index_t i = 0; i < rows; ++i) {
                T since = 1;
                if (call.log_decay) scale(y + i * P, P, since = decays[m].since[row + i]);
                vec<T> total = dot(phi + i * R, key_sum(state(task, chunk.first_window, m)), R) * since;
                for (index_t j = 0; j < padded<T>(keys); j += LANES<T>) {
                    vec<T> weight = load(scores + i * C + j);
                    if (call.log_decay) weight *= decays[m].between(row + i, j);
                    weight = until_column<T>(weight, j, row + i);
                    store(weighted + i * C + j, weight);
                    total += weight;
                }
                totals[i] = sum<T>(total);
            }
            product<T, true>(TILE_ROWS, P, keys, weighted, C, 1, v + m * C * P, P, y, P);
            const index_t head = (task.key_head * call.group + g) * call.share + m;
            for (index_t i = 0; i < rows; ++i) write(task.batch, chunk, row + i, head, y + i * P, totals[i]);
        }
    }

    // Add what the query saw of distant keys, which is in its place already, and divide.
    void write(index_t b, const Chunk &chunk, index_t i, index_t head, const T *answer, T total) {
        T *out = call.out.at(b, chunk.start + i, head), factor = 1;
        const bool adds = call.adds && chunk.has_distant;
        if (call.normalize) {
            T *normalizer = call.normalizer.at(b, chunk.start + i, head);
            *normalizer = total = adds ? *normalizer + total : total;
            factor = std::abs(total) < std::numeric_limits<T>::min() ? T(0) : 1 / total;
        }
        for (index_t j = 0; j < V; j += LANES<T>) {
            vec<T> sum = load(answer + j);
            if (adds) sum += load_some(out + j, V - j);
            store_some(out + j, sum * factor, V - j);
        }
    }

    // Carry the windows that are looked through later over the chunk.
    void pass(const Task &task, const Chunk &chunk, index_t first_window) {
        const index_t size = chunk.size(), rows = padded_rows(K);
        const auto [first, last] = task.values(call);
        for (index_t m = first; m < last; ++m) {
            T *values = v + m * C * P, over = 1;
            const bool alone = first_window == chunk.last_window;
            T *onto = alone ? state(task, first_window, m) : sums;
            if (call.log_decay) {
                over = decays[m].over;
                for (index_t j = 0; j < size; ++j) scale(values + j * P, P, decays[m].until[j]);
                if (alone) scale(onto, rows * P + R, over);
            }
            if (!alone) clear(onto, rows * P + R);
            product<T, true>(rows, P, size, psi, 1, R, values, P, onto, P);
            for (index_t j = 0; j < size; ++j)
                add_to(key_sum(onto), psi + j * R, R, call.log_decay ? decays[m].until[j] : T(1));
            for (index_t window = first_window; !alone && window <= chunk.last_window; ++window) {
                scale(state(task, window, m), rows * P + R, over);
                add_to(state(task, window, m), sums, rows * P + R, T(1));
            }
        }
    }
};

template <class T> void attend(const Call<T> &call) {
    in_threads(call.num_tasks(), call.threads, [&](index_t number, index_t thread) {
        Forward<T>(call, call.scratch + thread * call.scratch_size).run(Task(call, number));
    }, bool(call.log_decay));
}
extern "C" {
void attend_float32(const Call<float> *call) { attend(*call); }
void attend_float64(const Call<double> *call) { attend(*call); }
// How many numbers each thread needs.
index_t scratch_float32(const Call<float> *call) { return Forward<float>(*call, nullptr).buffers.used; }
index_t scratch_float64(const Call<double> *call) { return Forward<double>(*call, nullptr).buffers.used; }
}
