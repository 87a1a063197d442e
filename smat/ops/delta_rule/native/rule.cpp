// The gated delta rule, forward: one head of one sequence after the other, chunk after chunk.
#include "chunk.h"

template <class T> struct Forward {
    const Call<T> &call;
    Buffers<T> buffers;
    ChunkTiles<T> tiles;
    T *k_t, *y;

    Forward(const Call<T> &call, T *scratch) : call(call), buffers{scratch}, tiles(call, buffers) {
        k_t = buffers.take(call.width_k() * call.rows());
        y = buffers.take(TILE_ROWS * call.width_v());
    }

    void run(index_t task) {
        const index_t b = task / call.heads, head = task % call.heads;
        load_state(call, call.first + call.place(task), tiles.before);
        for (index_t start = 0; start < call.length;) {
            const index_t block = start / call.block_size, end = (block + 1) * call.block_size;
            if (call.kept && start == block * call.block_size)
                save_state(call, tiles.before, call.kept + call.place(block * call.batch * call.heads + task));
            const index_t stop = std::min({start + call.chunk_size, end, call.length});
            tiles.fill(b, head, start, stop - start, k_t);
            answer(b, head);
            tiles.pass(tiles.before);
            start = stop;
        }
        save_state(call, tiles.before, call.last + call.place(task));
    }

    void answer(index_t b, index_t head) {
        const index_t P = tiles.P, R = tiles.R, C = tiles.C;
        for (index_t row = 0; row < tiles.size; row += TILE_ROWS) {
            const index_t end = std::min(row + TILE_ROWS, tiles.size);
            product<T, false>(TILE_ROWS, P, tiles.K, tiles.q + row * R, R, 1, tiles.before, P, y, P);
            for (index_t i = row; i < end; ++i) scale(y + (i - row) * P, P, tiles.decay.since[i]);
            product<T, true>(TILE_ROWS, P, end, tiles.reads + row * C, C, 1, tiles.update, P, y, P);
            for (index_t i = row; i < end; ++i)
                store_row(y + (i - row) * P, call.out.at(b, tiles.start + i, head), tiles.V);
        }
    }
};

template <class T> void run(const Call<T> &call) {
    in_threads(call.batch * call.heads, call.threads, [&](index_t task, index_t thread) {
        Forward<T>(call, call.scratch + thread * call.scratch_size).run(task);
    }, true);
}
extern "C" {
void run_float32(const Call<float> *call) { run(*call); }
void run_float64(const Call<double> *call) { run(*call); }
// How many numbers each thread needs.
index_t scratch_float32(const Call<float> *call) { return Forward<float>(*call, nullptr).buffers.used; }
index_t scratch_float64(const Call<double> *call) { return Forward<double>(*call, nullptr).buffers.used; }
}
