// One row of the long range, a head of values: its visits in order, and its tokens laid out so.
#pragma once
#include "blocks.h"
#include "radon.h"

// The arguments, as `smat/ops/smat/native/long_range.py` writes them. The last dimension of types
// and their weights are the reads of a query. Keys are distant below num_distant, queries read from
// first on; until (B, n, Hv) and since (B, T - first, Hv) are what gates leave.
template <class T> struct Call {
    Array<const T> q, k, v, key_gate, write_weight, read_weight, until, since;
    Array<const index_t> profile, query_type;
    Array<T> out, normalizer;
    Array<const T> grad_out;
    Array<T> grad_q, grad_k, grad_v, grad_key_gate, grad_write_weight, grad_read_weight;
    Array<T> by_query, by_key;  // (B, T - first, Hv) and (B, n, Hv): what moves the gates
    const T *moves;             // (B, Hv, folds): what a move of the boundary leaves
    const index_t *key_stop, *query_start, *query_stop;  // of every fold
    T **work;                                            // buffers of every unit
    index_t batch, key_heads, query_heads, value_heads, key_dim, value_dim, reads, length;
    index_t num_distant, first, num_folds, field_size, ambient_dim, first_type, map, normalize;
    index_t backward, num_threads, num_splits;

    index_t shared() const { return value_heads / key_heads; }  // heads of values of a key
    index_t group() const { return std::max<index_t>(1, query_heads / value_heads); }
    index_t asking() const { return length - first; }
    index_t visits() const { return group() * asking() * reads; }
    index_t feature_tiles() const { return (key_dim + LANES<T> - 1) / LANES<T>; }
    bool is_direct() const { return ambient_dim < 2 && reads == 1 && num_splits == 1; }
    index_t value_tiles() const { return (value_dim + LANES<T> - 1) / LANES<T>; }
};

enum Role {
    PSI, VALUES, GRAD_PSI, GRAD_VALUES, PHI, ANSWERS, GRAD_PHI, NUMBERS, INDEX, POINTS, TYPES,
    SCRATCH, NUM_ROLES
};

// Visits sorted by fold and entry: where each goes, and the runs of every fold.
struct Order {
    int32_t *place, *visit, *entry, *begin, *fold_begin;

    int32_t *take(int32_t *memory, index_t visits, index_t num_folds) {
        place = memory, visit = place + visits, entry = visit + visits, begin = entry + visits;
        fold_begin = begin + visits + 1;
        return fold_begin + num_folds + 1;
    }
    Runs runs(index_t fold) const {
        const index_t at = fold_begin[fold];
        return {entry + at, begin + at, fold_begin[fold + 1] - at};
    }
    // Sort the visits of a fold; `each(use)` calls use(visit, entry) for all of them.
    template <class Each> void sort(index_t fold, index_t num_entries, int32_t *count, Each each) {
        if (fold == 0) fold_begin[0] = begin[0] = 0;
        std::fill(count, count + num_entries, 0);
        each([&](index_t, index_t at) { ++count[at]; });
        int32_t run = fold_begin[fold], next = begin[run];
        for (index_t at = 0; at < num_entries; ++at) {
            const int32_t visits = count[at];
            count[at] = next, next += visits;
            if (visits) entry[run++] = at, begin[run] = next;
        }
        fold_begin[fold + 1] = run;
        each([&](index_t visit, index_t at) { place[visit] = count[at]++; });
    }
};

template <class T> inline vec<T> keep(vec<T> x, index_t count) {
    vec<T> kept{};
    store_some(reinterpret_cast<T *>(&kept), x, count);
    return kept;
}

constexpr index_t AHEAD = 8;  // tokens

template <class T> struct Row {
    const Call<T> &call;
    const Space space;
    const index_t b, h, key_head;  // h among the heads of values
    const index_t group, shared_query;  // heads of queries of its own; the one shared with others
    T **work;
    T *numbers;  // the normaliser of every visit, or its gradient; scales of gradients of answers
    Order keys, queries;

    Row(const Call<T> &c, index_t batch, index_t head, T **buffers, bool sorted = false)
        : call(c), space(c.field_size, c.ambient_dim), b(batch), h(head),
          key_head(head / c.shared()), group(c.group()),
          shared_query(head * c.query_heads / c.value_heads), work(buffers),
          numbers(buffers[NUMBERS]) {
        int32_t *index = reinterpret_cast<int32_t *>(work[INDEX]);
        index = keys.take(index, call.num_distant, call.num_folds);
        int32_t *count = queries.take(index, call.visits(), call.num_folds);
        for (index_t fold = sorted ? call.num_folds : 0; fold < call.num_folds; ++fold) {
            keys.sort(fold, space.num_points, count, [&](auto use) {
                for (index_t t = fold ? call.key_stop[fold - 1] : 0; t < call.key_stop[fold]; ++t)
                    use(t, space.place(call.profile ? *call.profile.at(b, t, h)
                                                    : t % space.num_points));
            });
            queries.sort(fold, space.num_types, count, [&](auto use) {
                each_query(call.query_start[fold], call.query_stop[fold],
                           [&](index_t t, index_t head, index_t visit) {
                    index_t type = (t + call.first_type) % space.num_types;
                    type += type < 0 ? space.num_types : 0;
                    for (index_t j = 0; j < call.reads; ++j)
                        use(visit + j, call.query_type ? call.query_type.at(b, t, head)[j] : type);
                });
            });
        }
    }

    // use(token, head of answers, first visit) for the queries of some tokens.
    template <class Use> void each_query(index_t start, index_t stop, Use use) const {
        for (index_t g = 0; g < call.group(); ++g)
            for (index_t t = start; t < stop; ++t)
                use(t, h * call.group() + g,
                    (g * call.asking() + t - call.first) * call.reads);
    }
    template <class Use> void each_query(Use use) const { each_query(call.first, call.length, use); }

    T *psi(index_t tile, Role role = PSI) const {
        return work[role] + tile * call.num_distant * LANES<T>;
    }
    T *phi(index_t tile, Role role = PHI) const {
        return work[role] + tile * call.visits() * LANES<T>;
    }
    vec<T> features(const T *x, index_t tile) const {
        const index_t count = call.key_dim - tile * LANES<T>;
        const vec<T> value = feature<T>(call.map, load_some(x + tile * LANES<T>, count));
        return count < LANES<T> ? keep<T>(value, count) : value;
    }
    const T *query(index_t t, index_t head) const {
        return call.q.at(b, t, query_head(head));
    }
    index_t query_head(index_t head) const {
        return call.query_heads < call.value_heads ? shared_query : head;
    }
    T key_scale(index_t t) const {
        return one_or(call.key_gate, t, key_head) * one_or(call.write_weight, t, h) *
               one_or(call.until, t, h);
    }
    T one_or(const Array<const T> &x, index_t t, index_t head) const {
        return x ? *x.at(b, t, head) : T(1);
    }
    T weight(index_t t, index_t head, index_t j) const {
        return call.read_weight ? call.read_weight.at(b, t, head)[j] : T(1);
    }

    // Order the vectors of a visit that comes later: its place is anywhere, and memory is slow.
    void fetch(Role role, const Order &order, index_t visit, index_t size, index_t tiles) const {
        for (index_t tile = 0; visit < size && tile < tiles; ++tile)
            __builtin_prefetch(work[role] + (tile * size + order.place[visit]) * LANES<T>);
    }
    index_t split_tiles() const { return (call.value_tiles() - 1) / call.num_splits + 1; }

    // Lay features out, keys with all that weighs them, queries with the weight of each read.
    void pack() const {
        for (index_t t = 0; t < call.num_distant; ++t) {
            const T scale = key_scale(t);
            for (index_t tile = 0; tile < call.feature_tiles(); ++tile)
                store(psi(tile) + keys.place[t] * LANES<T>,
                      features(call.k.at(b, t, key_head), tile) * scale);
        }
        each_query([&](index_t t, index_t head, index_t visit) {
            for (index_t tile = 0; tile < call.feature_tiles(); ++tile) {
                const vec<T> x = features(query(t, head), tile);
                for (index_t j = 0; j < call.reads; ++j)
                    store(phi(tile) + queries.place[visit + j] * LANES<T>, x * weight(t, head, j));
            }
        });
    }
    // Columns of values, or of answers, of the tiles that a split has.
    T *columns(index_t tile, Role role) const {
        const index_t size = role == ANSWERS ? call.visits() : call.num_distant;
        return work[role] + tile / call.num_splits * size * LANES<T>;
    }
    template <class Use> void each_column(index_t split, Use use) const {
        for (index_t tile = split; tile < call.value_tiles(); tile += call.num_splits)
            use(tile, tile * LANES<T>, call.value_dim - tile * LANES<T>);
    }
    void pack_values(index_t split) const {
        for (index_t t = 0; t < call.num_distant; ++t) {
            const T *from = call.v.at(b, t, h);
            each_column(split, [&](index_t tile, index_t at, index_t count) {
                store(columns(tile, VALUES) + keys.place[t] * LANES<T>, load_some(from + at, count));
            });
        }
    }
    void write_answers(index_t split) const {
        each_query([&](index_t t, index_t head, index_t visit) {
            T *to = call.out.at(b, t, head);
            fetch(ANSWERS, queries, visit + AHEAD * call.reads, call.visits(), split_tiles());
            const T left = one_or(call.since, t - call.first, h);
            each_column(split, [&](index_t tile, index_t at, index_t count) {
                vec<T> y{};
                for (index_t j = 0; j < call.reads; ++j)
                    y += load(columns(tile, ANSWERS) + queries.place[visit + j] * LANES<T>);
                store_some(to + at, y * left, count);
            });
        });
    }
    void write_normalizers() const {
        each_query([&](index_t t, index_t head, index_t visit) {
            T z = 0;
            for (index_t j = 0; j < call.reads; ++j) z += numbers[queries.place[visit + j]];
            *call.normalizer.at(b, t, head) = z * one_or(call.since, t - call.first, h);
        });
    }
};
