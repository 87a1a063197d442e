// What native kernels share: vectors, register tiles, a transposition, an exponential, threads.
//
// Vectors are GCC's (and Clang's) own, as wide as the processor's. A product is worked off in tiles
// of TILE_ROWS rows and two vectors, whose sums stay in registers: rows of buffers are padded to a
// whole number of vectors, and numbers of rows to a whole number of tiles.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, TILE_ROWS = 8;  // 16 sums in 32 registers
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, TILE_ROWS = 6;  // 12 sums in 16 registers
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16, TILE_ROWS = 8;
#else
constexpr int VECTOR_BYTES = 16, TILE_ROWS = 4;
#endif
#define VECTOR_OF(T) T __attribute__((vector_size(VECTOR_BYTES), aligned(alignof(T)), may_alias))

using index_t = int64_t;

template <class T> struct Vectors;
template <> struct Vectors<float> {
    typedef VECTOR_OF(float) type;
    typedef int32_t integer;
    typedef VECTOR_OF(int32_t) bits;
    typedef VECTOR_OF(uint32_t) raw;  // which may overflow
    static constexpr float magic = 12582912.0f, lowest = -87.33f;  // 1.5 * 2^23; log(tiny), rounded up
    static constexpr float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    static constexpr int mantissa = 23, degree = 6;
    // Nearest to exp, relatively, up to log(2) / 2: within 2e-9; 1 at 0, so that no decay is none.
    static constexpr float series[] = {1, 1.00000003f, 0.499999941f, 0.166664294f, 0.0416680128f,
                                       0.00837431665f, 0.0013843466f};
};
template <> struct Vectors<double> {
    typedef VECTOR_OF(double) type;
    typedef int64_t integer;
    typedef VECTOR_OF(int64_t) bits;
    typedef VECTOR_OF(uint64_t) raw;
    static constexpr double magic = 6755399441055744.0, lowest = -708.39;  // 1.5 * 2^52; log(tiny)
    static constexpr double log2e = 1.4426950408889634;
    static constexpr double ln2_high = 0.6931471803691238, ln2_low = 1.9082149292705877e-10;
    static constexpr int mantissa = 52, degree = 13;
    static constexpr double series[] = {  // 1 / k!
        1, 1, 1 / 2., 1 / 6., 1 / 24., 1 / 120., 1 / 720., 1 / 5040., 1 / 40320., 1 / 362880.,
        1 / 3628800., 1 / 39916800., 1 / 479001600., 1 / 6227020800.};
};
template <class T> using vec = typename Vectors<T>::type;
template <class T> constexpr index_t LANES = VECTOR_BYTES / sizeof(T);

template <class T> inline vec<T> load(const T *x) { return *reinterpret_cast<const vec<T> *>(x); }
template <class T> inline void store(T *x, vec<T> value) { *reinterpret_cast<vec<T> *>(x) = value; }

// Lane i of the result is lane picked[i] of two vectors, one behind the other.
template <class T> using lanes = typename Vectors<T>::bits;
template <class T> inline vec<T> pick(vec<T> x, vec<T> y, lanes<T> picked) {
#if defined(__clang__)
    vec<T> result;
    for (int i = 0; i < LANES<T>; ++i) result[i] = picked[i] < LANES<T> ? x[picked[i]] : y[picked[i] - LANES<T>];
    return result;
#else
    return __builtin_shuffle(x, y, picked);
#endif
}
template <class T> inline lanes<T> numbered() {
    lanes<T> numbers{};
    for (int i = 0; i < LANES<T>; ++i) numbers[i] = i;
    return numbers;
}
template <class T> inline T sum(vec<T> x) {
    for (int half = LANES<T> / 2; half > 0; half /= 2) x += pick<T>(x, x, numbered<T>() ^ half);
    return x[0];
}

inline index_t round_up(index_t size, index_t step) { return (size + step - 1) / step * step; }
template <class T> inline index_t padded(index_t columns) { return round_up(columns, LANES<T>); }
inline index_t padded_rows(index_t rows) { return round_up(rows, TILE_ROWS); }

// exp(x) for x <= 0; what would be subnormal is 0, as in smat/ops/linear/decay.py. NaN stays NaN,
// unless a caller adds it anyway.
template <class T, bool KEEPS_NAN = true> inline vec<T> exp_or_zero(vec<T> x) {
    using V = Vectors<T>;
    const vec<T> shifted = x * V::log2e + V::magic, n = shifted - V::magic;
    const vec<T> rest = (x - n * V::ln2_high) - n * V::ln2_low;
    vec<T> series = vec<T>{} + V::series[V::degree];
    for (int k = V::degree; k > 0; --k) series = series * rest + V::series[k - 1];
    const auto bits = (typename V::raw)series + ((typename V::raw)shifted << V::mantissa);
    const vec<T> result = x < V::lowest ? vec<T>{} : (vec<T>)bits;
    if (!KEEPS_NAN) return result;
    return x != x ? x : result;
}
template <class T> inline T exp_or_zero_of(double x) {  // the same of one number
    return x < Vectors<T>::lowest ? T(0) : T(std::exp(x));
}

// elu + 1 = exp(min(x, 0)) + max(x, 0), relu, or x itself, and the derivative from the value.
enum Feature { ELU = 0, RELU = 1, IDENTITY = 2 };
template <class T> inline vec<T> feature(int map, vec<T> x) {
    const vec<T> zero{};
    if (map == ELU) return exp_or_zero<T, false>(x > zero ? zero : x) + (x < zero ? zero : x);
    return map == RELU ? (x < zero ? zero : x) : x;
}
template <class T> inline vec<T> feature_slope(int map, vec<T> value) {
    const vec<T> zero{}, one = zero + 1;
    if (map == ELU) return value > one ? one : value;
    return map == RELU ? (value > zero ? one : zero) : one;
}

// Read the last, partial vector of a row of numbers that is not padded; the rest is 0.
template <class T> inline vec<T> load_some(const T *x, index_t count) {
    if (count >= LANES<T>) return load(x);
    vec<T> some{};
    std::memcpy(&some, x, count * sizeof(T));
    return some;
}
template <class T> inline void store_some(T *x, vec<T> value, index_t count) {
    if (count >= LANES<T>) store(x, value);
    else std::memcpy(x, &value, count * sizeof(T));
}

// c (TILE_ROWS, COLUMNS vectors) = or += a b. Entry (row, k) of a is a[row * a_row + k * a_depth].
template <class T, int COLUMNS, bool ADD>
inline void product_tile(index_t depth, const T *a, index_t a_row, index_t a_depth, const T *b,
                         index_t b_row, T *c, index_t c_row) {
    vec<T> sums[TILE_ROWS][COLUMNS];
    for (int i = 0; i < TILE_ROWS; ++i)
        for (int j = 0; j < COLUMNS; ++j)
            sums[i][j] = ADD ? load(c + i * c_row + j * LANES<T>) : vec<T>{};
    for (index_t k = 0; k < depth; ++k, a += a_depth, b += b_row) {
        vec<T> row[COLUMNS];
        for (int j = 0; j < COLUMNS; ++j) row[j] = load(b + j * LANES<T>);
        for (int i = 0; i < TILE_ROWS; ++i)
            for (int j = 0; j < COLUMNS; ++j) sums[i][j] += a[i * a_row] * row[j];
    }
    for (int i = 0; i < TILE_ROWS; ++i)
        for (int j = 0; j < COLUMNS; ++j) store(c + i * c_row + j * LANES<T>, sums[i][j]);
}

// The same for padded numbers of rows and columns.
template <class T, bool ADD>
inline void product(index_t rows, index_t columns, index_t depth, const T *a, index_t a_row,
                    index_t a_depth, const T *b, index_t b_row, T *c, index_t c_row) {
    index_t j = 0;
    for (; j + 2 * LANES<T> <= columns; j += 2 * LANES<T>)
        for (index_t i = 0; i < rows; i += TILE_ROWS)
            product_tile<T, 2, ADD>(depth, a + i * a_row, a_row, a_depth, b + j, b_row,
                                    c + i * c_row + j, c_row);
    if (j < columns)
        for (index_t i = 0; i < rows; i += TILE_ROWS)
            product_tile<T, 1, ADD>(depth, a + i * a_row, a_row, a_depth, b + j, b_row,
                                    c + i * c_row + j, c_row);
}

// y (columns, rows) = x', for buffers whose rows and columns are padded to whole vectors. Blocks of
// LANES x LANES are transposed in registers: halves of rows are exchanged, then quarters, and so on.
template <class T>
inline void transpose(index_t rows, index_t columns, const T *x, index_t x_row, T *y, index_t y_row) {
    constexpr int N = LANES<T>;
    const lanes<T> numbers = numbered<T>();
    for (index_t i = 0; i < rows; i += N)
        for (index_t j = 0; j < columns; j += N) {
            vec<T> block[N];
            for (int k = 0; k < N; ++k) block[k] = load(x + (i + k) * x_row + j);
#pragma GCC unroll 8
            for (int half = N / 2; half > 0; half /= 2) {
                const lanes<T> upper = (numbers & half) != 0;  // lanes that come from the other row
                const lanes<T> low = (numbers & ~upper) | ((numbers - half + N) & upper);
                const lanes<T> high = ((numbers + half) & ~upper) | ((numbers + N) & upper);
#pragma GCC unroll 64
                for (int k = 0; k < N; ++k)
                    if (!(k & half)) {
                        const vec<T> one = block[k], other = block[k + half];
                        block[k] = pick<T>(one, other, low);
                        block[k + half] = pick<T>(one, other, high);
                    }
            }
            for (int k = 0; k < N; ++k) store(y + (j + k) * y_row + i, block[k]);
        }
}

// (B, T, heads, width) as a caller has it; rows of numbers lie without gaps.
template <class T> struct Array {
    T *data;
    index_t batch, token, head;  // strides
    T *at(index_t b, index_t t, index_t h) const { return data + b * batch + t * token + h * head; }
    explicit operator bool() const { return data != nullptr; }
};

// Ask for rows before they are needed: each is short, so that the processor does not foresee them.
template <bool WRITE, class T>
inline void prefetch(const Array<T> &from, index_t b, index_t head, index_t start, index_t rows,
                     index_t count) {
    for (index_t i = 0; i < rows; ++i) {
        const T *x = from.at(b, start + i, head);
        for (index_t f = 0; f < count; f += 64 / sizeof(T)) __builtin_prefetch(x + f, WRITE, 3);
    }
}

// If asked for, numbers below the smallest normal one are 0 while a kernel runs: what decays ends as
// one of them, and they are very slow to work with.
class FlushSubnormals {
#if defined(__SSE2__)
    unsigned before = __builtin_ia32_stmxcsr();

  public:
    explicit FlushSubnormals(bool asked) { __builtin_ia32_ldmxcsr(asked ? before | 0x8040 : before); }
    ~FlushSubnormals() { __builtin_ia32_ldmxcsr(before); }
#else
  public:
    explicit FlushSubnormals(bool) {}
#endif
};

// OpenMP's own way into a parallel region, if torch has loaded a library of it. Its threads keep their
// cores for some milliseconds after an operation of torch, waiting for the next: it had better be ours.
using Region = void (*)(void (*)(void *), void *, unsigned, unsigned);
inline Region parallel_region() {
    static const auto found = reinterpret_cast<Region>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
}

// Work off tasks in some threads, each of which says which of them it is.
template <class Work>
void in_threads(index_t num_tasks, index_t num_threads, Work work, bool flushes = false) {
    std::atomic<index_t> next{0}, named{0};
    auto run = [&] {
        FlushSubnormals flush(flushes);
        const index_t thread = named.fetch_add(1);
        for (index_t task; (task = next.fetch_add(1)) < num_tasks;) work(task, thread);
    };
    num_threads = std::min(num_threads, num_tasks);
    if (num_threads > 1 && parallel_region())
        return parallel_region()([](void *x) { (*static_cast<decltype(run) *>(x))(); }, &run, num_threads, 0);
    std::vector<std::thread> others;
    try {
        for (index_t i = 1; i < num_threads; ++i) others.emplace_back(run);
    } catch (const std::system_error &) {  // the threads that there are do all of it
    }
    run();
    for (auto &each : others) each.join();
}
