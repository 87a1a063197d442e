// One token of decoding in one call, and a slab of a fold (Algorithm 3).
//
// The torch forms, which say what happens when, are smat/ops/smat/step.py and fold.py.
#include "radon.h"

// The arguments, as `smat/ops/smat/native/decode.py` writes them: tokens (B, heads, .), tables as smat/ops/smat/state.py lays them out. place (B, 4): the position, the slot of the profile
// table (-1: nothing is written), that of the window, the buffer of types (-1: none).
template <class T> struct Step {
    const T *q, *k, *v;
    const double *log_decay;
    const T *key_gate;
    const index_t *profile, *query_type;
    const T *write_weight, *read_weight;
    T *recent, *profile_table, *type_table;
    double *lambda, *edge_lambda, *profile_lambda;
    index_t *place;
    T *out;
    index_t batch, heads, query_heads, q_heads, k_heads, v_heads, decay_heads, gate_heads;
    index_t profile_heads, weight_heads, reads, slots, key_dim, value_dim, num_profiles, num_types;
    index_t first_type, map, normalize, local, num_threads, q_row, k_row, v_row;  // strides
};

// What is left at lambda of what was written at another one: sums in two parts each.
template <class T> T left_since(const double *now, const double *then) {
    const double gone = (now[0] - then[0]) + (now[1] - then[1]);
    return exp_or_zero_of<T>(gone > 0 ? 0 : gone);
}

// state = left state + (far psi) v', all of it one behind the other.
template <class T>
void add_product(T *state, T left, const T *psi, T far, const T *v, index_t r, index_t p) {
    for (index_t i = 0; i < r; ++i, state += p) {
        const T scale = far * psi[i];
#pragma GCC ivdep
        for (index_t c = 0; c < p; ++c) state[c] = state[c] * left + scale * v[c];
    }
}

// y += scale phi' state.
template <class T>
void add_answer(T *y, const T *state, const T *phi, T scale, index_t r, index_t p) {
    for (index_t i = 0; i < r; ++i, state += p) {
        const T weight = scale * phi[i];
#pragma GCC ivdep
        for (index_t c = 0; c < p; ++c) y[c] += weight * state[c];
    }
}

template <class T> void map_features(int map, const T *x, T scale, T *to, index_t count) {
    for (index_t i = 0; i < count; i += LANES<T>)
        store_some(to + i, feature<T>(map, load_some(x + i, count - i)) * scale, count - i);
}

// One head of keys of one sequence: write, then answer the queries of its group.
template <class T> void step_head(const Step<T> &s, index_t b, index_t h, T *scratch) {
    const index_t r = s.key_dim, p = s.value_dim + s.normalize, size = r * p;
    const index_t rows = s.batch * s.heads, row = b * s.heads + h, group = s.query_heads / s.heads;
    const index_t *place = s.place + 4 * b, position = place[0], slot = place[1], buffer = place[3];
    auto of_head = [&](index_t count) { return b * count + h * count / s.heads; };
    T *psi = scratch, *v = psi + r, *phi = v + p, *y = phi + r;
    double *now = s.lambda ? s.lambda + 2 * row : nullptr;
    T left = 1;
    if (s.log_decay) {
        const double given = s.log_decay[of_head(s.decay_heads)];
        const double gate = given < -1000 ? -1000 : given;
        left = exp_or_zero_of<T>(gate);
        if (now) {
            const double sum = now[0] + gate;
            now[1] += gate - (sum - now[0]);
            now[0] = sum;
        }
    }
    map_features(s.map, s.k + b * s.k_row + h * s.k_heads / s.heads * r,
                 s.key_gate ? s.key_gate[of_head(s.gate_heads)] : T(1), psi, r);
    std::copy_n(s.v + b * s.v_row + h * s.v_heads / s.heads * s.value_dim, s.value_dim, v);
    if (s.normalize) v[p - 1] = 1;
    for (index_t each = 0; each < s.slots; ++each)
        add_product(s.recent + (each * rows + row) * size, left, psi, T(1), v, r, p);
    if (s.profile_table && slot >= 0) {
        const index_t point =
            s.profile ? s.profile[of_head(s.profile_heads)] : position % s.num_profiles;
        const index_t entry = (slot * rows + row) * s.num_profiles + point;
        T kept = 1;
        if (s.profile_lambda) {
            double *then = s.profile_lambda + 2 * entry;
            kept = left_since<T>(now, then);
            std::copy_n(now, 2, then);
        }
        const T far = s.write_weight ? s.write_weight[of_head(s.weight_heads)] : T(1);
        add_product(s.profile_table + entry * size, kept, psi, far, v, r, p);
    }
    const bool reads = s.type_table && buffer >= 0;
    const T since = reads && s.edge_lambda
                        ? left_since<T>(now, s.edge_lambda + 2 * (place[2] * rows + row)) : T(1);
    for (index_t g = 0; g < group; ++g) {
        const index_t head = b * s.query_heads + h * group + g;
        const index_t asks = (h * group + g) * s.q_heads / s.query_heads;
        map_features(s.map, s.q + b * s.q_row + asks * r, T(1), phi, r);
        std::fill(y, y + p, T(0));
        if (s.local) add_answer(y, s.recent + (place[2] * rows + row) * size, phi, T(1), r, p);
        for (index_t j = 0; reads && j < s.reads; ++j) {
            const index_t at = head * s.reads + j;
            index_t type = s.query_type ? s.query_type[at] : (position + s.first_type) % s.num_types;
            type += type < 0 ? s.num_types : 0;
            const T weight = since * (s.read_weight ? s.read_weight[at] : T(1));
            const T *state = s.type_table + ((buffer * rows + row) * s.num_types + type) * size;
            add_answer(y, state, phi, weight, r, p);
        }
        T scale = 1;
        if (s.normalize)
            scale = std::abs(y[p - 1]) < std::numeric_limits<T>::min() ? T(0) : 1 / y[p - 1];
        for (index_t c = 0; c < s.value_dim; ++c) s.out[head * s.value_dim + c] = y[c] * scale;
    }
}

// Whether values are as they must be: nothing is written before that is known.
template <class T> bool fits(const Step<T> &s) {
    auto all = [&](const auto *x, index_t heads, auto good) {
        return !x || std::all_of(x, x + s.batch * heads, good);
    };
    auto below = [](index_t limit) { return [=](index_t at) { return at >= 0 && at < limit; }; };
    return all(s.log_decay, s.decay_heads, [](double x) { return !(x > 0); }) &&
           all(s.key_gate, s.gate_heads, [](T x) { return !(x < 0); }) &&
           all(s.profile, s.profile_heads, below(s.num_profiles)) &&
           all(s.query_type, s.query_heads * s.reads, below(s.num_types));
}

template <class T> int run(const Step<T> &s) {
    if (!fits(s)) return 1;
    const index_t size = 2 * (s.key_dim + s.value_dim + s.normalize);
    in_threads(s.batch * s.heads, s.num_threads, [&](index_t row, index_t) {
        std::vector<T> scratch(size);
        step_head(s, row / s.heads, row % s.heads, scratch.data());
    }, s.log_decay != nullptr);
    for (index_t b = 0; b < s.batch; ++b) ++s.place[4 * b];
    return 0;
}

// Some columns of one head's tables: U' = between U + C (left Delta), and Delta is cleared.
template <class T> struct Slab {
    T *delta, *types;
    const T *old;             // the table before, or none
    const T *left, *between;  // (rows, profiles) and (rows,), or none
    const index_t *rows;      // of the batch
    T *work;
    index_t num_rows, stride, columns, state_size, field_size, ambient_dim;  // stride of a row
    index_t type_stride;
};

template <class T> index_t slab_work(const Slab<T> &s) {
    const Space space(s.field_size, s.ambient_dim);
    const index_t entries = space.num_points + (space.is_identity() ? 0 : space.num_types);
    return (padded<T>(s.columns) / LANES<T> * entries + space.scratch_vectors()) * LANES<T>;
}

// Entries of a table lie far apart: some are ordered before their turn comes.
template <class T> inline void fetch(const T *entry, index_t columns) {
    constexpr index_t LINE = 64 / sizeof(T);
    for (index_t c = 0; c < columns + LINE - 1; c += LINE)
        __builtin_prefetch(entry + std::min(c, columns - 1), 1);
}

template <class T> void fold_row(const Slab<T> &s, const Space &space, index_t i) {
    constexpr index_t AHEAD = 12, N = LANES<T>;
    const index_t tiles = padded<T>(s.columns) / N, size = s.state_size;
    T *delta = s.delta + s.rows[i] * s.stride, *points = s.work;
    T *sums = space.is_identity() ? points : points + tiles * space.num_points * N;
    T *scratch = sums + tiles * space.num_types * N;
    auto each_tile = [&](auto use) {
        for (index_t c = 0; c < s.columns; c += N) use(c / N, c, s.columns - c);
    };
    for (index_t at = 0; at < space.num_points; ++at, delta += size) {
        const T left = s.left ? s.left[i * space.num_points + at] : T(1);
        const index_t place = space.place(at);
        if (at + AHEAD < space.num_points) fetch(delta + AHEAD * size, s.columns);
        each_tile([&](index_t tile, index_t c, index_t count) {
            store(points + (tile * space.num_points + place) * N,
                  load_some(delta + c, count) * left);
            store_some(delta + c, vec<T>{}, count);
        });
    }
    each_tile([&](index_t tile, index_t, index_t) {
        auto vectors = [](T *x) { return reinterpret_cast<vec<T> *>(x); };
        if (!space.is_identity())
            tabulate(space, vectors(points + tile * space.num_points * N),
                     vectors(sums + tile * space.num_types * N), vectors(scratch));
    });
    const T between = s.between ? s.between[i] : T(1);
    T *types = s.types + s.rows[i] * s.type_stride;
    const T *old = s.old ? s.old + s.rows[i] * s.type_stride : nullptr;
    for (index_t at = 0; at < space.num_types; ++at, types += size) {
        if (at + AHEAD < space.num_types) {
            fetch(types + AHEAD * size, s.columns);
            if (old) fetch(old + (at + AHEAD) * size, s.columns);
        }
        each_tile([&](index_t tile, index_t c, index_t count) {
            vec<T> value = load(sums + (tile * space.num_types + at) * N);
            if (old) value += load_some(old + at * size + c, count) * between;
            store_some(types + c, value, count);
        });
    }
}

template <class T> void fold(const Slab<T> &s) {
    FlushSubnormals flush(s.left != nullptr);
    const Space space(s.field_size, s.ambient_dim);
    for (index_t i = 0; i < s.num_rows; ++i) fold_row(s, space, i);
}

extern "C" {
int step_float32(const Step<float> *s) { return run(*s); }
int step_float64(const Step<double> *s) { return run(*s); }
index_t slab_work_float32(const Slab<float> *s) { return slab_work(*s); }
index_t slab_work_float64(const Slab<double> *s) { return slab_work(*s); }
void fold_float32(const Slab<float> *s) { fold(*s); }
void fold_float64(const Slab<double> *s) { fold(*s); }
}
