// Masks as smat.SMatMask builds them: geometry, boundary schedules, who sees whom.
// tests/test_explorer.py holds `dense` to SMatMask.dense() bit for bit.
"use strict";

const SmatMasks = (() => {
  const isPrime = (n) => {
    if (n < 2) return false;
    for (let f = 2; f * f <= n; f++) if (n % f === 0) return false;
    return true;
  };

  const nextPrime = (atLeast) => {
    let n = Math.max(2, atLeast);
    while (!isPrime(n)) n++;
    return n;
  };

  // The smallest prime with q^d >= n.
  const fieldSizeFor = (numDistant, vcDim) => {
    if (vcDim === 1) return 2;
    let q = 2;
    while (q ** vcDim < numDistant) q = nextPrime(q + 1);
    return q;
  };

  const digits = (number, q, count) => {
    const found = new Array(count);
    for (let place = count - 1; place >= 0; place--) {
      found[place] = number % q;
      number = Math.floor(number / q);
    }
    return found;
  };

  // Directions: leading 1 in the first coordinate first, then in the second, the rest counting.
  const directionsOf = (q, dim) => {
    const found = [];
    for (let zeros = 0; zeros < dim; zeros++) {
      const free = dim - zeros - 1;
      for (let tail = 0; tail < q ** free; tail++) {
        found.push([...new Array(zeros).fill(0), 1, ...digits(tail, q, free)]);
      }
    }
    return found;
  };

  const geometryOf = (vcDim, fieldSize) => {
    const dim = vcDim - 1;
    const directions = directionsOf(fieldSize, dim);
    const numProfiles = fieldSize ** dim;
    const numTypes = dim === 0 ? 1 : directions.length * fieldSize;
    const point = (profile) => digits(profile, fieldSize, dim);
    const hyperplane = (type) => ({
      direction: dim === 0 ? [] : directions[Math.floor(type / fieldSize)],
      offset: type % fieldSize,
    });
    const contains = (type, profile) => {
      if (dim === 0) return true;
      const { direction, offset } = hyperplane(type);
      const x = point(profile);
      return direction.reduce((sum, a, axis) => sum + a * x[axis], 0) % fieldSize === offset;
    };
    return { vcDim, fieldSize, dim, numProfiles, numTypes, point, hyperplane, contains };
  };

  // n(t) of the query at a 0-based position.
  const SCHEDULES = {
    kept: ({ numDistant }) => (t) => (numDistant > 0 && t >= numDistant ? numDistant : 0),
    none: () => () => 0,
    doubling: () => (t) => (1 << (31 - Math.clz32(t + 1))) >> 1,
    window: ({ step }) => (t) => Math.max(0, Math.floor(t / step) - 1) * step,
  };
  const MOVES = { doubling: true, window: true };

  const maskOf = ({ seqLen, vcDim, chunkSize, fieldSize, schedule, numDistant, step }) => {
    const half = chunkSize * Math.floor(seqLen / (2 * chunkSize));
    const moves = schedule in MOVES;
    const fixed = { rebuilt: half, kept: numDistant, none: 0 }[schedule] ?? half;
    const q = fieldSize || fieldSizeFor(fixed, vcDim);
    const geometry = geometryOf(vcDim, q);
    const rule = schedule === "rebuilt" ? "kept" : schedule;
    const boundary = SCHEDULES[rule]({ numDistant: fixed, step });
    const anchor = moves ? 0 : fixed;
    const profile = (j) => j % geometry.numProfiles;
    const modulo = (a, b) => ((a % b) + b) % b;
    const queryType = (t) => modulo(t - anchor + 1, geometry.numTypes);
    const sees = (t, j) =>
      j <= t && (j >= boundary(t) || geometry.contains(queryType(t), profile(j)));
    const dense = () => {
      const bits = new Uint8Array(seqLen * seqLen);
      const rows = new Map(); // points on a hyperplane, found once a type
      for (let t = 0; t < seqLen; t++) {
        const n = boundary(t), type = queryType(t);
        if (n > 0 && !rows.has(type)) {
          rows.set(type, Uint8Array.from({ length: geometry.numProfiles },
            (_, p) => (geometry.contains(type, p) ? 1 : 0)));
        }
        for (let j = 0; j <= t; j++) {
          bits[t * seqLen + j] = j >= n ? 1 : rows.get(type)[profile(j)];
        }
      }
      return bits;
    };
    const last = boundary(seqLen - 1);
    const isProved = vcDim === 1 ? seqLen >= 2
      : !moves && geometry.numProfiles <= last && 2 * geometry.numTypes <= seqLen - last;
    return { seqLen, vcDim, schedule, geometry, boundary, moves, profile, queryType, sees, dense,
      numDistant: last, isProved };
  };

  // Additions of states for one table, in the factored form.
  const additions = ({ vcDim, fieldSize: q }) => {
    let sum = vcDim === 1 ? 1 : 0;
    for (let dim = 2; dim < vcDim; dim++) sum += (dim - 1) * q ** (dim + 1) + q ** dim;
    return sum;
  };

  // States that decoding keeps.
  const cacheStates = (mask) => {
    const { numTypes, numProfiles } = mask.geometry;
    if (mask.numDistant === 0) return 1;
    return mask.moves ? 2 * (numTypes + numProfiles + 1) : numTypes + 1;
  };

  return { isPrime, nextPrime, fieldSizeFor, geometryOf, maskOf, additions, cacheStates };
})();
