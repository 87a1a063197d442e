// Tabulate and backproject one tile of a table: q^D entries of one vector of columns each.
//
// The shears of smat/geometry/radon.py, additions only. An entry is one vector, so that a q x q
// problem lies in the first cache or, cut along x, nearly so; sums are gathered in registers.
// Points stand at [x2, .., xD, x1], so that a shear reads and writes runs along y = x1.
#pragma once

#include "tiles.h"

constexpr int LONGEST_RUN = 12;        // sums that are gathered in registers at a time
constexpr index_t NEAR_BYTES = 28672;  // of the rows that a shear keeps in the first cache

inline index_t power(index_t base, index_t exponent) {
    index_t result = 1;
    while (exponent-- > 0) result *= base;
    return result;
}

// Where the tiles of a transform lie, and what it needs beside them.
struct Space {
    index_t q, dim, num_points, num_types;

    Space(index_t field_size, index_t ambient_dim)
        : q(field_size), dim(ambient_dim), num_points(power(q, dim)),
          num_types(dim ? (num_points - 1) / (q - 1) * q : 1) {}

    bool is_identity() const { return dim < 2; }

    // The place of a point among the entries of a tile.
    index_t place(index_t profile) const {
        if (dim < 2) return profile;
        const index_t rest = num_points / q;
        return profile % rest * q + profile / rest;
    }

    // Rows of a shear in the first cache, two tables between steps, sums over leading coordinates.
    index_t scratch_vectors() const {
        return is_identity() ? 0 : q * (q + LONGEST_RUN) + 2 * num_points + 2 * num_points / q;
    }
};

// N sums along y for every a, over some rows x: to[a][i] (+)= sum of rows[x][y + i + sign a x].
template <class V, int N>
void sum_runs(const V *rows, index_t length, index_t first, index_t num_rows, index_t y, index_t q,
              int sign, V *to, index_t to_row) {
    for (index_t a = 0; a < q; ++a, to += to_row) {
        const index_t step = sign > 0 || a == 0 ? a : q - a;
        index_t start = (step * first + y) % q;
        V sums[N];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) sums[i] = first ? to[i] : V{};
        const V *row = rows;
        for (index_t x = 0; x < num_rows; ++x, row += length) {
#pragma GCC unroll 16
            for (int i = 0; i < N; ++i) sums[i] += row[start + i];
            start += step;
            start -= start >= q ? q : 0;
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) to[i] = sums[i];
    }
}

// to[a][y] = sum over x of from[x][y + sign a x mod q], rows of either at a distance; the rows of
// the next shear lie `next` behind these.
template <class V>
void shear(const V *from, index_t from_row, index_t next, V *to, index_t to_row, index_t q,
           int sign, V *near) {
    const index_t num_runs = (q + LONGEST_RUN - 1) / LONGEST_RUN, longest = (q - 1) / num_runs + 1;
    const index_t length = q + longest - 1;  // a run never wraps
    const index_t fitting = NEAR_BYTES / index_t(sizeof(V)) / length;
    const index_t num_cuts = (q - 1) / std::max<index_t>(1, std::min(q, fitting)) + 1;
    for (index_t cut = 0; cut < num_cuts; ++cut) {
        const index_t first = cut * q / num_cuts, last = (cut + 1) * q / num_cuts;
        for (index_t x = first; x < last; ++x) {
            V *row = near + (x - first) * length;
            const V *old = from + x * from_row;
            for (index_t y = 0; y < q; ++y) {
                row[y] = old[y];
                __builtin_prefetch(old + next + y);
            }
            std::copy(row, row + longest - 1, row + q);
        }
        for (index_t run = 0; run < num_runs; ++run) {
            const index_t y = run * q / num_runs, end = (run + 1) * q / num_runs;
            switch (end - y) {
#define RUN(N) \
    case N: sum_runs<V, N>(near, length, first, last - first, y, q, sign, to + y, to_row); break;
                RUN(1) RUN(2) RUN(3) RUN(4) RUN(5) RUN(6)
                RUN(7) RUN(8) RUN(9) RUN(10) RUN(11) RUN(12)
#undef RUN
            }
        }
    }
}

// U = C F, of one tile; F stays.
template <class V>
void tabulate(const Space &space, const V *points, V *types, V *scratch) {
    const index_t q = space.q;
    V *near = scratch, *between = near + q * (q + LONGEST_RUN);
    V *lower = between + 2 * space.num_points;
    const V *problem = points;
    for (index_t dim = space.dim; dim > 1; --dim) {
        const index_t others = power(q, dim - 2), size = others * q * q;
        const V *from = problem;
        for (index_t step = 2; step <= dim; ++step) {
            V *to = step == dim ? types : between + step % 2 * space.num_points;
            for (index_t o = 0; o < others; ++o)
                shear(from + o * q, others * q, q, to + o * q * q, q, q, -1, near);
            from = to;
        }
        types += size;
        V *next = dim == 2 ? types : lower;  // summed over the first coordinate
        for (index_t entry = 0; entry < others * q; ++entry) {
            V sum = problem[entry * q];
            for (index_t y = 1; y < q; ++y) sum += problem[entry * q + y];
            next[entry % others * q + entry / others] = sum;
        }
        problem = next, lower += others * q;
    }
}

// F = C' U, of one tile; U stays.
template <class V>
void backproject(const Space &space, const V *types, V *points, V *scratch) {
    const index_t q = space.q;
    V *near = scratch, *between = near + q * (q + LONGEST_RUN);
    V *lower = between + 2 * space.num_points + 2 * space.num_points / q;
    const V *below = types + space.num_types - q;  // the problem one dimension lower, done
    for (index_t dim = 2; dim <= space.dim; ++dim) {
        const index_t others = power(q, dim - 2), size = others * q * q;
        const V *from = types + space.num_types - (size * q - q) / (q - 1);
        V *result = dim == space.dim ? points : (lower -= size);
        for (index_t step = dim; step >= 2; --step) {
            V *to = step == 2 ? result : between + step % 2 * space.num_points;
            for (index_t o = 0; o < others; ++o)
                shear(from + o * q * q, q, q * q, to + o * q, others * q, q, 1, near);
            from = to;
        }
        for (index_t entry = 0; entry < others * q; ++entry) {
            const V more = below[entry % others * q + entry / others];
            for (index_t y = 0; y < q; ++y) result[entry * q + y] += more;
        }
        below = result;
    }
}
