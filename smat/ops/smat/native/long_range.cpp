// The long-range branch on a CPU: pool, tabulate, read, and their adjoints (equation 6, adjoint 11).
//
// The torch form, which says how gates and moving boundaries enter, is smat/ops/smat/long_range.py.
// A unit of work is a row, or some columns of its values; it goes through its table a block at a
// time, as many features and columns as a vector has numbers, from keys to answers.
#include "direct.h"

// What both passes do with one block: the tables of every fold, first to last or back.
template <class T> struct Tables {
    const Row<T> &row;
    const Block<T> points, types;

    Tables(const Row<T> &r, index_t num_features)
        : row(r), points{r.work[POINTS], r.space.num_points, num_features},
          types{r.work[r.space.is_identity() ? POINTS : TYPES], r.space.num_types, num_features} {}

    T move(index_t fold) const {
        const Call<T> &call = row.call;
        const index_t at = (row.b * call.value_heads + row.h) * call.num_folds + fold;
        return call.moves ? call.moves[at] : T(1);
    }
    void transform(bool back) const {
        if (row.space.is_identity()) return;
        for (index_t i = 0; i < points.num_features; ++i) {
            auto *p = reinterpret_cast<vec<T> *>(points.at(i, 0));
            auto *t = reinterpret_cast<vec<T> *>(types.at(i, 0));
            auto *scratch = reinterpret_cast<vec<T> *>(row.work[SCRATCH]);
            if (back) backproject(row.space, t, p, scratch);
            else tabulate(row.space, p, t, scratch);
        }
    }
    // pool(runs, points, whether they are new), then read(runs, types), fold after fold.
    template <class Pool, class Read> void forwards(Pool pool, Read read) const {
        for (index_t fold = 0; fold < row.call.num_folds; ++fold) {
            if (fold && row.call.moves) points.scale(move(fold));
            pool(row.keys.runs(fold), points, fold == 0);
            transform(false);
            read(row.queries.runs(fold), types);
        }
    }
    // The adjoint: pool(runs, types, whether they are new), then read(runs, points).
    template <class Pool, class Read> void backwards(Pool pool, Read read) const {
        const index_t last = row.call.num_folds - 1;
        for (index_t fold = last; fold >= 0; --fold) {
            pool(row.queries.runs(fold), types, fold == last);
            transform(true);
            read(row.keys.runs(fold), points);
            if (fold && row.call.moves) types.scale(move(fold));
        }
    }
};

template <class T> index_t features_of(const Call<T> &call, index_t tile) {
    return std::min(LANES<T>, call.key_dim - tile * LANES<T>);
}

template <class T> void attend_columns(const Row<T> &row, index_t column) {
    for (index_t tile = 0; tile < row.call.feature_tiles(); ++tile)
        Tables<T>(row, features_of(row.call, tile)).forwards(
            [&](auto runs, auto table, bool fresh) {
                pool(runs, row.psi(tile), row.columns(column, VALUES), table, fresh);
            },
            [&](auto runs, auto table) {
                read<T, false>(runs, row.phi(tile), table, row.columns(column, ANSWERS), tile > 0);
            });
}

template <class T> void attend_ones(const Row<T> &row) {
    for (index_t tile = 0; tile < row.call.feature_tiles(); ++tile)
        Tables<T>(row, 1).forwards(
            [&](auto runs, auto table, bool fresh) {
                pool_ones<T>(runs, row.psi(tile), nullptr, table, fresh);
            },
            [&](auto runs, auto table) {
                read_ones(runs, row.phi(tile), table, row.numbers, tile > 0);
            });
    row.write_normalizers();
}

template <class T> void pull_columns(const Gradients<T> &row, index_t column) {
    const T *values = row.columns(column, VALUES), *grads = row.columns(column, ANSWERS);
    T *grad_values = row.columns(column, GRAD_VALUES);
    for (index_t tile = 0; tile < row.call.feature_tiles(); ++tile) {
        const Tables<T> tables(row, features_of(row.call, tile));
        tables.forwards(
            [&](auto runs, auto table, bool fresh) {
                pool(runs, row.psi(tile), values, table, fresh);
            },
            [&](auto runs, auto table) {
                read<T, true>(runs, grads, table, row.phi(tile, GRAD_PHI), true);
            });
        tables.backwards(
            [&](auto runs, auto table, bool fresh) {
                pool(runs, row.phi(tile), grads, table, fresh);
            },
            [&](auto runs, auto table) {
                read<T, false>(runs, row.psi(tile), table, grad_values, tile > 0);
                read<T, true>(runs, values, table, row.psi(tile, GRAD_PSI), true);
            });
    }
}

template <class T> void pull_ones(const Gradients<T> &row) {
    for (index_t tile = 0; tile < row.call.feature_tiles(); ++tile) {
        const Tables<T> tables(row, 1);
        tables.forwards(
            [&](auto runs, auto table, bool fresh) {
                pool_ones<T>(runs, row.psi(tile), nullptr, table, fresh);
            },
            [&](auto runs, auto table) {
                spread_ones(runs, row.numbers, table, row.phi(tile, GRAD_PHI));
            });
        tables.backwards(
            [&](auto runs, auto table, bool fresh) {
                pool_ones<T>(runs, row.phi(tile), row.numbers, table, fresh);
            },
            [&](auto runs, auto table) {
                spread_ones<T>(runs, nullptr, table, row.psi(tile, GRAD_PSI));
            });
    }
}

template <class T> void attend_split(const Row<T> &row, index_t split) {
    row.pack();
    row.pack_values(split);
    row.each_column(split, [&](index_t tile, index_t, index_t) { attend_columns(row, tile); });
    row.write_answers(split);
    if (row.call.normalize && split == row.call.num_splits - 1) attend_ones(row);
}

template <class T> void pull_split(const Gradients<T> &row, index_t split) {
    row.pack();
    row.pack_values(split);
    row.start();
    row.pack_grads(split);
    row.each_column(split, [&](index_t tile, index_t, index_t) { pull_columns(row, tile); });
    row.add_value_grads(split);
    if (row.call.normalize && split == row.call.num_splits - 1) pull_ones(row);
}

template <class T> void run(const Call<T> &call) {
    const index_t heads = call.batch * call.key_heads, splits = call.num_splits;
    const bool flushes = call.moves != nullptr;  // gates make numbers that nearly vanish
    in_threads(heads * splits, call.num_threads, [&](index_t task, index_t thread) {
        const index_t head = task / splits, first = head % call.key_heads * call.shared();
        for (index_t h = first; h < first + call.shared(); ++h) {
            T **work = call.work + thread * NUM_ROLES;
            const index_t b = head / call.key_heads;
            if (call.is_direct()) Direct<T>(call, b, h, work).attend();
            else attend_split(Row<T>(call, b, h, work), task % splits);
        }
    }, flushes);
}

template <class T> void run_backward(const Call<T> &call) {
    const index_t heads = call.batch * call.key_heads, shared = call.shared();
    const index_t splits = call.num_splits;
    const bool flushes = call.moves != nullptr;  // gates make numbers that nearly vanish
    if (splits == 1)
        return in_threads(heads, call.num_threads, [&](index_t head, index_t thread) {
            const index_t first = head % call.key_heads * shared;
            for (index_t h = first; h < first + shared; ++h) {
                T **work = call.work + thread * NUM_ROLES;
                const index_t b = head / call.key_heads;
                if (call.is_direct()) {
                    Direct<T>(call, b, h, work).pull();
                    continue;
                }
                const Gradients<T> row(call, b, h, work);
                pull_split(row, 0);
                row.add_grads(0, 1);
            }
        }, flushes);
    // Every split has the gradients of features from its columns alone: they are added up behind.
    for (index_t m = 0; m < shared; ++m) {
        auto row_of = [&](index_t head, index_t unit, index_t parts) {
            return Gradients<T>(call, head / call.key_heads, head % call.key_heads * shared + m,
                                call.work + unit * NUM_ROLES, parts);
        };
        in_threads(heads * splits, call.num_threads, [&](index_t unit, index_t) {
            pull_split(row_of(unit / splits, unit, 1), unit % splits);
        }, flushes);
        in_threads(heads * splits, call.num_threads, [&](index_t unit, index_t) {
            const index_t head = unit / splits;
            row_of(head, head * splits, splits).add_grads(unit % splits, splits);
        });
    }
}

// How many numbers each buffer of a unit holds.
template <class T> void count_work(const Call<T> &call, index_t *sizes) {
    const Space space(call.field_size, call.ambient_dim);
    const index_t n = call.num_distant, visits = call.visits(), r = call.feature_tiles();
    const index_t c = (call.value_tiles() - 1) / call.num_splits + 1, back = call.backward;
    const index_t features = std::min(LANES<T>, call.key_dim);
    const index_t index = 4 * (n + visits) + 2 * (call.num_folds + 2) + space.num_types + 8;
    const index_t vectors[NUM_ROLES] = {
        n * r, n * c, back * n * r, back * n * c, visits * r, visits * c, back * visits * r,
        visits * 3 / LANES<T> + 3, index / LANES<T> + 1, features * space.num_points,
        space.is_identity() ? 0 : features * space.num_types, space.scratch_vectors()};
    for (int role = 0; role < NUM_ROLES; ++role)
        sizes[role] = call.is_direct() && role != INDEX && role != NUMBERS ? 0 : vectors[role] * LANES<T>;
    if (call.is_direct()) {
        sizes[POINTS] = Direct<T>::table_size(call, space);
        sizes[SCRATCH] = Direct<T>::scratch_size(call);
    }
}

extern "C" {
void work_float32(const Call<float> *call, index_t *sizes) { count_work(*call, sizes); }
void work_float64(const Call<double> *call, index_t *sizes) { count_work(*call, sizes); }
void long_range_float32(const Call<float> *call) {
    call->backward ? run_backward(*call) : run(*call);
}
void long_range_float64(const Call<double> *call) {
    call->backward ? run_backward(*call) : run(*call);
}
}
