// The gated delta rule, forward: one head of one sequence after the other, chunk after chunk.
#include "chunk.h"

template <class T> struct Forward {
    const Call<T> &call;
    Buffers<T> buffers;
    ChunkTiles<T> tiles;
    T *k_t, *y, *states;

    Forward(const Call<T> &call, T *scratch) : call(call), buffers{scratch}, tiles(call, buffers) {
        k_t = buffers.take(call.width_k() * call.rows());
        y = buffers.take(TILE_ROWS * call.width_v());
        states = buffers.take(call.heads_at_once * call.state_size());
    }

    void run(const Task &task) {
        for (index_t head = task.begin; head < task.end; ++head)
            load_state(call, call.first + call.place(task.b, head), states + (head - task.begin) * call.state_size());
        for (index_t start = 0, stop; start < call.length; start = stop) {
            const index_t block = start / call.block_size;
            stop = std::min({start + call.chunk_size, (block + 1) * call.block_size, call.length});
            for (index_t head = task.begin; head < task.end; ++head) {
                tiles.before = states + (head - task.begin) * call.state_size();
                if (call.kept && start == block * call.block_size)
                    save_state(call, tiles.before, call.kept + call.place(task.b, head, block));
                tiles.fill(task.b, head, start, stop - start, stop, k_t);
                answer(task.b, head);
                tiles.pass(tiles.before);
            }
        }
        for (index_t head = task.begin; head < task.end; ++head)
            save_state(call, states + (head - task.begin) * call.state_size(), call.last + call.place(task.b, head));
    }

    void answer(index_t b, index_t head) {
        const index_t P = tiles.P, R = tiles.R, C = tiles.C;
        for (index_t row = 0; row < tiles.size; row += TILE_ROWS) {
            const index_t end = std::min(row + TILE_ROWS, tiles.size);
            tiles.template foresee<true>(call.out, b, head, tiles.start + row, tiles.V);
            product<T, false>(TILE_ROWS, P, tiles.K, tiles.q + row * R, R, 1, tiles.before, P, y, P);
            for (index_t i = row; i < end; ++i) scale(y + (i - row) * P, P, tiles.decay.since[i]);
            product<T, true>(TILE_ROWS, P, end, tiles.reads + row * C, C, 1, tiles.update, P, y, P);
            for (index_t i = row; i < end; ++i)
                store_row(y + (i - row) * P, call.out.at(b, tiles.start + i, head), tiles.V);
        }
    }
};

template <class T> void run(const Call<T> &call) {
    in_threads(call.batch * call.head_blocks(), call.threads, [&](index_t number, index_t thread) {
        Forward<T>(call, call.scratch + thread * call.scratch_size).run(Task(call, number));
    }, true);
}
extern "C" {
void run_float32(const Call<float> *call) { run(*call); }
void run_float64(const Call<double> *call) { run(*call); }
// How many numbers each thread needs.
index_t scratch_float32(const Call<float> *call) { return Forward<float>(*call, nullptr).buffers.used; }
index_t scratch_float64(const Call<double> *call) { return Forward<double>(*call, nullptr).buffers.used; }
}
