// The gated delta rule, backward: blocks in reverse, from the states that were kept before them.
#include "chunk.h"

template <class T> struct Backward {
    const Call<T> &call;
    const index_t K, V, R, P, C;
    Buffers<T> buffers;
    std::vector<ChunkTiles<T>> block;  // the chunks of a block
    T *k_t, *update_t, *before_t, *adjoints, *adjoint, *adjoint_t, *pulled, *grad_update, *grad_error, *grad_reads,
        *grad_overlap, *grad_q, *grad_k, *inter, *by_query, *by_key, *columns;

    Backward(const Call<T> &call, T *scratch)
        : call(call), K(call.key_dim), V(call.value_dim), R(call.width_k()), P(call.width_v()),
          C(call.width_c()), buffers{scratch} {
        const index_t rows = call.rows(), longest = std::min(call.block_size, call.length);
        for (index_t start = 0; start < longest; start += call.chunk_size) block.emplace_back(call, buffers);
        k_t = buffers.take(R * rows), update_t = buffers.take(P * rows);
        const index_t state = std::max(padded_rows(K), R) * P + R * TILE_ROWS;
        for (T **square : {&before_t, &adjoint_t}) *square = buffers.take(state);
        adjoint = adjoints = buffers.take(call.heads_at_once * call.state_size());
        for (T **wide : {&pulled, &grad_update, &grad_error}) *wide = buffers.take(rows * P);
        for (T **square : {&grad_reads, &grad_overlap}) *square = buffers.take(rows * C);
        for (T **wide : {&grad_q, &grad_k, &inter}) *wide = buffers.take(rows * R);
        for (T **line : {&by_query, &by_key, &columns}) *line = buffers.take(rows);
    }

    void run(const Task &task) {
        for (index_t head = task.begin; head < task.end; ++head)
            load_state(call, call.first + call.place(task.b, head), adjoints + (head - task.begin) * call.state_size());
        for (index_t number = call.num_blocks() - 1; number >= 0; --number)
            for (index_t head = task.begin; head < task.end; ++head) {
                adjoint = adjoints + (head - task.begin) * call.state_size();
                pull_block(task.b, head, number);
            }
        for (index_t head = task.begin; head < task.end; ++head)
            save_state(call, adjoints + (head - task.begin) * call.state_size(), call.last + call.place(task.b, head));
    }

    // Load the chunks of a block one after the other, and pull them in reverse.
    void pull_block(index_t b, index_t head, index_t number) {
        index_t start = number * call.block_size, count = 0;
        const index_t before = start - call.block_size, end = std::min(start + call.block_size, call.length);
        load_state(call, call.kept + call.place(b, head, number), block[0].before);
        for (; start < end; start += call.chunk_size, ++count) {
            const index_t behind = start + call.chunk_size;
            block[count].fill(b, head, start, std::min(behind, end) - start, behind < end ? behind : before, k_t);
            if (behind >= end) continue;
            std::memcpy(block[count + 1].before, block[count].before, call.state_size() * sizeof(T));
            block[count].pass(block[count + 1].before);
        }
        while (count > 0) pull(b, head, block[--count]);
    }

    // Find the gradients of a chunk, and bring the adjoint of the state in front of it.
    void pull(index_t b, index_t head, const ChunkTiles<T> &chunk) {
        const index_t size = chunk.size;
        load_tile(call.grad_out, b, head, chunk.start, size, V, pulled, P);
        for (index_t row = 0; row < size; row += TILE_ROWS) {
            chunk.template foresee<true>(call.grad_v, b, head, chunk.start + row, call.v ? V : 0);
            chunk.template foresee<true>(call.grad_k, b, head, chunk.start + row, K);
        }
        pull_updates(chunk);
        write_values(b, head, chunk);
        pull_pairs(chunk);
        const T passing = sum<T>(dot(chunk.before, adjoint, K * P)) * chunk.decay.over;
        pull_states(chunk);
        for (index_t row = 0; row < size; row += TILE_ROWS) {  // a tile of queries, then one of keys
            const index_t end = std::min(row + TILE_ROWS, size), corner = row * C + row, later = size - row;
            chunk.template foresee<false>(call.grad_out, b, head, chunk.start - call.chunk_size + row, V);
            T *query = grad_q + row * R, *key = grad_k + row * R;
            product<T, true>(TILE_ROWS, R, end, grad_reads + row * C, C, 1, chunk.k, R, query, R);
            product<T, true>(TILE_ROWS, R, end, grad_overlap + row * C, C, 1, chunk.k, R, key, R);
            product<T, true>(TILE_ROWS, R, later, grad_overlap + corner, 1, C, chunk.k + row * R, R, key, R);
            product<T, true>(TILE_ROWS, R, later, grad_reads + corner, 1, C, chunk.q + row * R, R, key, R);
        }
        for (index_t i = 0; i < size; ++i) {
            scale(grad_q + i * R, R, T(call.scale));
            store_row(grad_q + i * R, call.grad_q.at(b, chunk.start + i, head), K);
            store_row(grad_k + i * R, call.grad_k.at(b, chunk.start + i, head), K);
        }
        write_gates(b, head, chunk, passing);
    }

    // What outputs and the state behind the chunk ask of its updates, and these of the errors.
    void pull_updates(const ChunkTiles<T> &chunk) {
        product<T, false>(padded_rows(chunk.size), P, K, chunk.k, R, 1, adjoint, P, grad_update, P);
        for (index_t j = 0; j < chunk.size; ++j) scale(grad_update + j * P, P, chunk.decay.until[j]);
        for (index_t key = 0; key < chunk.size; key += TILE_ROWS)
            product<T, true>(TILE_ROWS, P, chunk.size - key, chunk.reads + key * C + key, 1, C, pulled + key * P,
                             P, grad_update + key * P, P);
        chunk.substitute_backward(grad_update, grad_error);
    }

    void write_values(index_t b, index_t head, const ChunkTiles<T> &chunk) {
        for (index_t i = 0; i < chunk.size; ++i) {
            const vec<T> total = dot(grad_update + i * P, chunk.error + i * P, P);
            *call.grad_beta.at(b, chunk.start + i, head) = sum<T>(total);
            if (call.v) store_row(grad_error + i * P, call.grad_v.at(b, chunk.start + i, head), V);
        }
    }

    // Gradients of products of queries and keys, and of keys; what gates between them take part in.
    void pull_pairs(const ChunkTiles<T> &chunk) {
        transpose(chunk.size, P, chunk.update, P, update_t, C);
        clear(columns, C);
        for (index_t row = 0; row < chunk.size; row += TILE_ROWS) {
            const index_t end = std::min(row + TILE_ROWS, chunk.size), wide = padded<T>(end);
            product<T, false>(TILE_ROWS, wide, V, pulled + row * P, P, 1, update_t, C, grad_reads + row * C, C);
            product<T, false>(TILE_ROWS, wide, V, grad_error + row * P, P, 1, update_t, C, grad_overlap + row * C, C);
            for (index_t i = row; i < end; ++i) weigh(chunk, i, wide);
        }
    }
    void weigh(const ChunkTiles<T> &chunk, index_t i, index_t wide) {
        vec<T> pairs{};
        for (index_t j = 0; j < wide; j += LANES<T>) {
            const index_t at = i * C + j;
            const vec<T> left = chunk.decay.between(i, j);
            const vec<T> read = load(grad_reads + at), written = load(grad_overlap + at);
            const vec<T> pair = read * load(chunk.reads + at) + written * load(chunk.overlap + at);
            pairs += until_column<T>(pair, j, i - 1);
            store(columns + j, load(columns + j) + until_column<T>(pair, j, i - 1));
            store(grad_reads + at, until_column<T>(read * left, j, i));
            store(grad_overlap + at, until_column<T>(-written * left, j, i - 1));
        }
        by_query[i] = sum<T>(pairs);
    }

    // What goes through the states before and behind the chunk.
    void pull_states(const ChunkTiles<T> &chunk) {
        const index_t size = chunk.size, full = padded_rows(size);
        transpose(K, P, chunk.before, P, before_t, R);
        transpose(K, P, adjoint, P, adjoint_t, R);
        product<T, false>(full, R, V, chunk.moved, P, 1, adjoint_t, R, grad_k, R);
        for (index_t i = 0; i < size; ++i) {
            by_key[i] = sum<T>(dot(grad_k + i * R, chunk.k + i * R, R));
            scale(pulled + i * P, P, chunk.decay.since[i]);
            scale(grad_error + i * P, P, -chunk.decay.since[i]);
        }
        product<T, false>(full, R, V, pulled, P, 1, before_t, R, grad_q, R);
        product<T, false>(full, R, V, grad_error, P, 1, before_t, R, inter, R);
        for (index_t i = 0; i < size; ++i) {
            by_query[i] += sum<T>(dot(grad_q + i * R, chunk.q + i * R, R) + dot(inter + i * R, chunk.k + i * R, R));
            add_to(grad_k + i * R, inter + i * R, R, T(1));
        }
        scale(adjoint, padded_rows(K) * P, chunk.decay.over);
        product<T, true>(padded_rows(K), P, size, chunk.q, 1, R, pulled, P, adjoint, P);
        product<T, true>(padded_rows(K), P, size, chunk.k, 1, R, grad_error, P, adjoint, P);
    }

    // A gate is moved by every pair of a token before it and one not before it.
    void write_gates(index_t b, index_t head, const ChunkTiles<T> &chunk, T passing) {
        double earlier = passing, later = 0;
        for (index_t j = 0; j < chunk.size; ++j) {
            *call.grad_decay.at(b, chunk.start + j, head) = T(earlier);
            earlier += by_key[j];
        }
        for (index_t i = chunk.size - 1; i >= 0; --i) {
            later += double(by_query[i]) - columns[i];
            *call.grad_decay.at(b, chunk.start + i, head) += T(later);
        }
    }
};

template <class T> void run(const Call<T> &call) {
    in_threads(call.batch * call.head_blocks(), call.threads, [&](index_t number, index_t thread) {
        Backward<T>(call, call.scratch + thread * call.scratch_size).run(Task(call, number));
    }, true);
}
extern "C" {
void run_float32(const Call<float> *call) { run(*call); }
void run_float64(const Call<double> *call) { run(*call); }
index_t scratch_float32(const Call<float> *call) { return Backward<float>(*call, nullptr).buffers.used; }
index_t scratch_float64(const Call<double> *call) { return Backward<double>(*call, nullptr).buffers.used; }
}
