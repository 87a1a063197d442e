// The gradients of one row of the long range, back in the layout of the caller.
#pragma once
#include "rows.h"

template <class T> struct Gradients : Row<T> {
    using Row<T>::call, Row<T>::b, Row<T>::h, Row<T>::key_head, Row<T>::work, Row<T>::numbers;
    using Row<T>::keys, Row<T>::queries;
    const index_t num_parts;  // units side by side that hold parts; several have been sorted
    T *scales;                // of every query: 1 / normaliser, and what gates leave

    Gradients(const Call<T> &c, index_t batch, index_t head, T **buffers, index_t parts = 1)
        : Row<T>(c, batch, head, buffers, parts > 1), num_parts(parts),
          scales(numbers + c.visits()) {}

    // Begin with no gradients; take that of answers through the division, o = y / s.
    void start() const {
        const index_t r = call.feature_tiles();
        std::fill(work[GRAD_PSI], work[GRAD_PSI] + r * call.num_distant * LANES<T>, T(0));
        std::fill(work[GRAD_PHI], work[GRAD_PHI] + r * call.visits() * LANES<T>, T(0));
        this->each_query([&](index_t t, index_t head, index_t visit) {
            const auto [scale, number] = grad_scale(t, head);
            scales[visit / call.reads] = scale;
            for (index_t j = 0; j < call.reads; ++j) numbers[queries.place[visit + j]] = number;
        });
    }
    // What multiplies the gradient of an answer, and the gradient of its normaliser.
    std::pair<T, T> grad_scale(index_t t, index_t head) const {
        const T since = this->one_or(call.since, t - call.first, h);
        if (!call.normalize) return {since, T(0)};
        const T normalizer = *call.normalizer.at(b, t, head);
        const bool nothing = std::abs(normalizer) < std::numeric_limits<T>::min();
        const T scale = nothing ? T(0) : since / normalizer;
        const T *grad = call.grad_out.at(b, t, head), *out = call.out.at(b, t, head);
        vec<T> products{};
        for (index_t i = 0; i < call.value_dim; i += LANES<T>)
            products += load_some(grad + i, call.value_dim - i) *
                        load_some(out + i, call.value_dim - i);
        return {scale, -sum<T>(products) * scale};
    }
    void pack_grads(index_t split) const {
        this->each_query([&](index_t t, index_t head, index_t visit) {
            const T *from = call.grad_out.at(b, t, head), scale = scales[visit / call.reads];
            this->each_column(split, [&](index_t tile, index_t at, index_t count) {
                const vec<T> grad = load_some(from + at, count) * scale;
                for (index_t j = 0; j < call.reads; ++j)
                    store(this->columns(tile, ANSWERS) + queries.place[visit + j] * LANES<T>, grad);
            });
        });
    }
    void add_value_grads(index_t split) const {
        for (index_t t = 0; t < call.num_distant; ++t) {
            T *to = call.grad_v.at(b, t, h);
            this->fetch(GRAD_VALUES, keys, t + AHEAD, call.num_distant, this->split_tiles());
            this->each_column(split, [&](index_t tile, index_t at, index_t count) {
                const T *grad = this->columns(tile, GRAD_VALUES) + keys.place[t] * LANES<T>;
                store_some(to + at, load_some(to + at, count) + load(grad), count);
            });
        }
    }

    // What all parts found for one visit.
    vec<T> total(Role role, index_t offset) const {
        vec<T> found{};
        for (index_t part = 0; part < num_parts; ++part)
            found += load(work[part * NUM_ROLES + role] + offset);
        return found;
    }
    void add(T *to, vec<T> x, index_t tile) const {
        const index_t count = call.key_dim - tile * LANES<T>;
        to += tile * LANES<T>;
        store_some(to, load_some(to, count) + x, count);
    }

    // Add the gradients of keys, queries, gates and weights, for a share of the tokens.
    void add_grads(index_t part, index_t num_shares) const {
        const index_t n = call.num_distant, asking = call.asking();
        for (index_t t = part * n / num_shares; t < (part + 1) * n / num_shares; ++t) add_key(t);
        this->each_query(call.first + part * asking / num_shares,
                         call.first + (part + 1) * asking / num_shares,
                         [&](index_t t, index_t head, index_t visit) { add_query(t, head, visit); });
    }
    void add_key(index_t t) const {
        const T scale = this->key_scale(t);
        vec<T> dots{};
        this->fetch(GRAD_PSI, keys, t + AHEAD, call.num_distant, call.feature_tiles());
        for (index_t tile = 0; tile < call.feature_tiles(); ++tile) {
            const vec<T> x = this->features(call.k.at(b, t, key_head), tile);
            const vec<T> grad = total(GRAD_PSI, this->psi(tile, GRAD_PSI) - work[GRAD_PSI] +
                                                    keys.place[t] * LANES<T>);
            dots += x * grad;
            add(call.grad_k.at(b, t, key_head),
                grad * feature_slope<T>(call.map, x) * scale, tile);
        }
        add_gates(t, sum<T>(dots));
    }
    // Given the dot of a key's features with the gradient of what it wrote.
    void add_gates(index_t t, T dot) const {
        const T gate = this->one_or(call.key_gate, t, key_head);
        const T weight = this->one_or(call.write_weight, t, h);
        const T left = this->one_or(call.until, t, h);
        if (call.grad_key_gate) *call.grad_key_gate.at(b, t, key_head) += dot * weight * left;
        if (call.grad_write_weight) *call.grad_write_weight.at(b, t, h) += dot * gate * left;
        if (call.by_key) *call.by_key.at(b, t, h) = dot * gate * weight * left;
    }
    void add_query(index_t t, index_t head, index_t visit) const {
        const T *from = this->query(t, head);
        vec<T> dots{};
        this->fetch(GRAD_PHI, queries, visit + AHEAD * call.reads, call.visits(),
                    call.feature_tiles());
        for (index_t tile = 0; tile < call.feature_tiles(); ++tile) {
            const vec<T> x = this->features(from, tile);
            vec<T> grad{};
            for (index_t j = 0; j < call.reads; ++j) {
                const vec<T> found = total(GRAD_PHI, this->phi(tile, GRAD_PHI) - work[GRAD_PHI] +
                                                         queries.place[visit + j] * LANES<T>);
                grad += found * this->weight(t, head, j);
                if (call.grad_read_weight)
                    call.grad_read_weight.at(b, t, head)[j] += sum<T>(x * found);
            }
            dots += x * grad;
            add(call.grad_q.at(b, t, this->query_head(head)), grad * feature_slope<T>(call.map, x), tile);
        }
        if (call.by_query) *call.by_query.at(b, t - call.first, h) += sum<T>(dots);
    }
};
