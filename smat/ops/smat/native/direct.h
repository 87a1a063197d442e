// The long range where a type is a point (d = 1 and 2): no transform stands between pooling and
// reading, entries have many visits, and a piece of them is worked off at once, with their state in
// cache. Queries read one type each.
#pragma once
#include "gradients.h"

template <class T> struct Direct : Gradients<T> {
    using Row<T>::call, Row<T>::b, Row<T>::h, Row<T>::key_head, Row<T>::work, Row<T>::space;
    using Row<T>::keys, Row<T>::queries;
    static constexpr index_t PIECE = 64, ROWS = 72;  // visits at a time, and with padding
    const index_t r, columns, features;              // widths of buffers; rows of a state
    T *left, *right, *answer, *pulled, *turned;

    static index_t rows_of(const Call<T> &c) { return padded_rows(padded<T>(c.key_dim)); }
    static index_t table_size(const Call<T> &c, const Space &space) {
        return space.num_points * rows_of(c) * (padded<T>(c.value_dim) + 1);
    }
    static index_t scratch_size(const Call<T> &c) {
        const index_t wide = rows_of(c) + padded<T>(c.value_dim);
        return 2 * ROWS * wide + padded<T>(c.value_dim) * padded<T>(c.key_dim);
    }

    Direct(const Call<T> &c, index_t batch, index_t head, T **buffers)
        : Gradients<T>(c, batch, head, buffers), r(padded<T>(c.key_dim)),
          columns(padded<T>(c.value_dim)), features(rows_of(c)), left(buffers[SCRATCH]),
          right(left + ROWS * features), answer(right + ROWS * columns),
          pulled(answer + ROWS * columns), turned(pulled + ROWS * features) {
        invert(keys, call.num_distant);
        invert(queries, call.visits());
    }
    // Which visit stands at each place.
    void invert(Order &order, index_t size) {
        int32_t *visit = order.visit;
        for (index_t i = 0; i < size; ++i) visit[order.place[i]] = i;
    }
    T *state(index_t entry) const { return work[POINTS] + entry * features * columns; }
    T *ones(index_t entry) const {
        return work[POINTS] + space.num_points * features * columns + entry * features;
    }
    T move(index_t fold) const {
        return call.moves[(b * call.value_heads + h) * call.num_folds + fold];
    }
    void scale_table(T factor) const {
        T *table = work[POINTS];
        const index_t size = table_size(call, space);
        for (index_t i = 0; i < size; ++i) table[i] *= factor;
    }
    void clear_table() const {
        std::fill_n(work[POINTS], table_size(call, space), T(0));
    }

    struct Query {
        index_t t, head;
    };
    Query query_at(index_t place) const {
        const index_t visit = queries.visit[place];
        return {call.first + visit % call.asking(), h * call.group() + visit / call.asking()};
    }
    void take_features(const T *x, T scale, T *to) const {
        for (index_t i = 0; i < r; i += LANES<T>) store(to + i, Row<T>::features(x, i / LANES<T>) * scale);
    }
    void take_columns(const T *x, T scale, T *to) const {
        for (index_t i = 0; i < columns; i += LANES<T>)
            store(to + i, load_some(x + i, call.value_dim - i) * scale);
    }
    // use(first place, number of places, entry) for pieces of the visits of a fold.
    template <class Use> void each_piece(const Runs &runs, Use use) const {
        for (index_t run = 0; run < runs.count; ++run)
            for (index_t at = runs.begin[run]; at < runs.begin[run + 1]; at += PIECE)
                use(at, std::min(PIECE, runs.begin[run + 1] - at), index_t(runs.entry[run]));
    }
    // state += left' right, ones += sum of left, or of its rows times their numbers.
    void pool_piece(index_t count, index_t entry, const T *numbers) const {
        product<T, true>(features, columns, count, left, 1, features, right, columns,
                         state(entry), columns);
        if (!call.normalize) return;
        for (index_t i = 0; i < r; i += LANES<T>) {
            vec<T> total{};
            for (index_t row = 0; row < count; ++row)
                total += load(left + row * features + i) * (numbers ? numbers[row] : T(1));
            store(ones(entry) + i, load(ones(entry) + i) + total);
        }
    }
    void take_keys(index_t at, index_t count, bool weighted) const {
        for (index_t i = 0; i < count; ++i) {
            const index_t t = keys.visit[at + i];
            take_features(call.k.at(b, t, key_head), weighted ? this->key_scale(t) : T(1),
                          left + i * features);
            take_columns(call.v.at(b, t, h), T(1), right + i * columns);
        }
    }
    void pool_keys(index_t fold) const {
        if (fold == 0) clear_table();
        else if (call.moves) scale_table(move(fold));
        each_piece(keys.runs(fold), [&](index_t at, index_t count, index_t entry) {
            take_keys(at, count, true);
            pool_piece(count, entry, nullptr);
        });
    }

    // Queries of a piece: features to the left, times weights or not.
    void take_queries(index_t at, index_t count, bool weighted) const {
        for (index_t i = 0; i < count; ++i) {
            const Query ask = query_at(at + i);
            const T weight = weighted ? this->weight(ask.t, ask.head, 0) : T(1);
            take_features(this->query(ask.t, ask.head), weight, left + i * features);
        }
    }
    // Their gradients of numerators to the right; those of normalisers come apart.
    void take_grads(index_t at, index_t count, T *numbers) const {
        for (index_t i = 0; i < count; ++i) {
            const Query ask = query_at(at + i);
            const auto [scale, number] = this->grad_scale(ask.t, ask.head);
            take_columns(call.grad_out.at(b, ask.t, ask.head), scale, right + i * columns);
            numbers[i] = number;
        }
    }

    // Write numerators and normalisers.
    void attend() const {
        for (index_t fold = 0; fold < call.num_folds; ++fold) {
            pool_keys(fold);
            each_piece(queries.runs(fold), [&](index_t at, index_t count, index_t entry) {
                take_queries(at, count, true);
                product<T, false>(padded_rows(count), columns, call.key_dim, left, features, 1,
                                  state(entry), columns, answer, columns);
                for (index_t i = 0; i < count; ++i) write_answer(query_at(at + i), i, entry);
            });
        }
    }
    void write_answer(const Query &ask, index_t i, index_t entry) const {
        const T since = this->one_or(call.since, ask.t - call.first, h);
        T *to = call.out.at(b, ask.t, ask.head);
        for (index_t c = 0; c < call.value_dim; c += LANES<T>)
            store_some(to + c, load(answer + i * columns + c) * since, call.value_dim - c);
        if (!call.normalize) return;
        vec<T> dots{};
        for (index_t f = 0; f < r; f += LANES<T>)
            dots += load(left + i * features + f) * load(ones(entry) + f);
        *call.normalizer.at(b, ask.t, ask.head) = sum<T>(dots) * since;
    }

    // pulled = right state', in which states of the table are read from their columns.
    void pull_piece(index_t count, index_t entry) const {
        transpose(r, call.value_dim, state(entry), columns, turned, r);
        product<T, false>(padded_rows(count), r, call.value_dim, right, columns, 1, turned, r,
                          pulled, features);
    }
    void pull() const {
        T numbers[PIECE];
        for (index_t fold = 0; fold < call.num_folds; ++fold) {
            pool_keys(fold);
            each_piece(queries.runs(fold), [&](index_t at, index_t count, index_t entry) {
                take_queries(at, count, false);
                take_grads(at, count, numbers);
                pull_piece(count, entry);
                for (index_t i = 0; i < count; ++i) add_query(query_at(at + i), i, entry, numbers[i]);
            });
        }
        clear_table();
        for (index_t fold = call.num_folds - 1; fold >= 0; --fold) {
            each_piece(queries.runs(fold), [&](index_t at, index_t count, index_t entry) {
                take_queries(at, count, true);
                take_grads(at, count, numbers);
                pool_piece(count, entry, numbers);
            });
            each_piece(keys.runs(fold), [&](index_t at, index_t count, index_t entry) {
                take_keys(at, count, false);
                product<T, false>(padded_rows(count), columns, call.key_dim, left, features, 1,
                                  state(entry), columns, answer, columns);
                pull_piece(count, entry);
                for (index_t i = 0; i < count; ++i) add_key(keys.visit[at + i], i, entry);
            });
            if (fold && call.moves) scale_table(move(fold));
        }
    }
    // The gradient of features, number ones added: its dot with them; use(where, both).
    template <class Use> T each_grad(index_t i, index_t entry, T number, Use use) const {
        vec<T> dots{};
        for (index_t f = 0; f < r; f += LANES<T>) {
            const vec<T> x = load(left + i * features + f);
            vec<T> grad = load(pulled + i * features + f);
            if (call.normalize) grad += load(ones(entry) + f) * number;
            dots += x * grad;
            use(f / LANES<T>, grad * feature_slope<T>(call.map, x));
        }
        return sum<T>(dots);
    }
    void add_query(const Query &ask, index_t i, index_t entry, T number) const {
        const T weight = this->weight(ask.t, ask.head, 0);
        T *to = call.grad_q.at(b, ask.t, this->query_head(ask.head));
        const T dot = each_grad(i, entry, number, [&](index_t tile, vec<T> grad) {
            this->add(to, grad * weight, tile);
        });
        if (call.grad_read_weight) *call.grad_read_weight.at(b, ask.t, ask.head) += dot;
        if (call.by_query) *call.by_query.at(b, ask.t - call.first, h) += dot * weight;
    }
    void add_key(index_t t, index_t i, index_t entry) const {
        const T scale = this->key_scale(t);
        T *to = call.grad_k.at(b, t, key_head), *grad_v = call.grad_v.at(b, t, h);
        const T dot = each_grad(i, entry, T(1), [&](index_t tile, vec<T> grad) {
            this->add(to, grad * scale, tile);
        });
        for (index_t c = 0; c < call.value_dim; c += LANES<T>) {
            const index_t count = call.value_dim - c;
            const vec<T> grad = load(answer + i * columns + c) * scale;
            store_some(grad_v + c, load_some(grad_v + c, count) + grad, count);
        }
        this->add_gates(t, dot);
    }
};
