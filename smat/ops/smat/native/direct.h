// The long range where a type is a point (d = 1 and 2): no transform stands between pooling and
// reading, entries have many visits, and a piece of them is worked off at once, with their state in
// cache. Queries read one type each.
#pragma once
#include "gradients.h"

template <class T> struct Direct : Gradients<T> {
    using Row<T>::call, Row<T>::b, Row<T>::h, Row<T>::key_head, Row<T>::work, Row<T>::space;
    using Row<T>::keys, Row<T>::queries, Row<T>::group;
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
        if (group == 1) return {call.first + visit, h};  // a division takes long
        return {call.first + visit % call.asking(), h * group + visit / call.asking()};
    }
    // Features of visits to the left; each(i) gives a row and its scale. The map is known to the
    // compiler, so that what it needs stays in registers.
    template <int MAP, class Each> void map_rows(index_t count, Each each) const {
        const index_t whole = call.key_dim / LANES<T> * LANES<T>, rest = call.key_dim - whole;
        for (index_t i = 0; i < count; ++i) {
            const auto [x, scale] = each(i);
            T *to = left + i * features;
            for (index_t f = 0; f < whole; f += LANES<T>) store(to + f, feature<T>(MAP, load(x + f)) * scale);
            if (rest)
                store(to + whole, keep<T>(feature<T>(MAP, load_some(x + whole, rest)), rest) * scale);
        }
    }
    template <class Each> void take_features(index_t count, Each each) const {
        if (call.map == ELU) map_rows<ELU>(count, each);
        else if (call.map == RELU) map_rows<RELU>(count, each);
        else map_rows<IDENTITY>(count, each);
    }
    void take_columns(const T *x, T scale, T *to) const {
        for (index_t i = 0; i < columns; i += LANES<T>)
            store(to + i, load_some(x + i, call.value_dim - i) * scale);
    }
    // Rows of a visit lie anywhere: they are asked for some visits before, those that are written
    // while their piece is multiplied.
    void fetch_key(index_t place) const {
        if (place >= call.num_distant) return;
        const index_t t = keys.visit[place];
        prefetch<false>(call.k, b, key_head, t, 1, call.key_dim);
        prefetch<false>(call.v, b, h, t, 1, call.value_dim);
    }
    void fetch_query(index_t place) const {
        if (place >= call.visits()) return;
        const Query ask = query_at(place);
        prefetch<false>(call.q, b, this->query_head(ask.head), ask.t, 1, call.key_dim);
        if (!call.backward) return;
        prefetch<false>(call.grad_out, b, ask.head, ask.t, 1, call.value_dim);
        prefetch<false>(call.out, b, ask.head, ask.t, 1, call.value_dim);
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
        take_features(count, [&](index_t i) {
            const index_t t = keys.visit[at + i];
            fetch_key(at + i + AHEAD);
            return std::make_pair(call.k.at(b, t, key_head), weighted ? this->key_scale(t) : T(1));
        });
        for (index_t i = 0; i < count; ++i) {
            const index_t t = keys.visit[at + i];
            take_columns(call.v.at(b, t, h), T(1), right + i * columns);
            if (weighted) continue;
            prefetch<true>(call.grad_k, b, key_head, t, 1, call.key_dim);
            prefetch<true>(call.grad_v, b, h, t, 1, call.value_dim);
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
        take_features(count, [&](index_t i) {
            const Query ask = query_at(at + i);
            fetch_query(at + i + AHEAD);
            if (!call.backward) prefetch<true>(call.out, b, ask.head, ask.t, 1, call.value_dim);
            else if (!weighted)
                prefetch<true>(call.grad_q, b, this->query_head(ask.head), ask.t, 1, call.key_dim);
            const T weight = weighted ? this->weight(ask.t, ask.head, 0) : T(1);
            return std::make_pair(this->query(ask.t, ask.head), weight);
        });
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
