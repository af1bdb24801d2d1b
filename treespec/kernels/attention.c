// Attention over the nodes of a tree, and over prompts. `kernels.c` includes this file.
//
// Two passes over the keys: all scores and their largest; then exponentials and sums, key by key in
// the order of the columns. A hidden key adds 0, so where it lies changes nothing.
//
// A thread takes a unit of rows: queries that read the same keys and values, node by node the heads of a group. It
// takes the keys in strips, and a strip in tiles of L keys. Five nodes of two heads, each of which sees three columns
// and the nodes up to its own; tiles of two keys, strips of four, blocks of two rows:
//
//             strip 0    strip 1
//   tile       0   1      2   3
//   node 0    xx  xx                 x: a key that both heads see
//   node 1    xx  xx  |  x.          .: a hidden key; its weight is 0
//   node 2    xx  xx  |  xx          nothing: the block sees no key of this tile and of those to its right, so they are
//   node 3    xx  xx  |  xx  x.      left out
//   node 4    xx  xx  |  xx  xx
//
// A strip is read once for all rows, and HIGH rows by WIDTH vectors are summed in registers. Each sum still takes its
// products in their order, whatever rows, tiles and strips there are.
//
// Few units of long texts do not divide evenly among threads. Then all threads share each unit, with a meeting between
// the passes: a score is of one key, so the first pass is shared by strips, and the second by numbers of the values.

typedef struct {
  const void *q, *k, *v, *mask;  // [B, heads, N, D], [B, KV, T, D], [B, KV, T, DV], [B or 1, N, T - free]
  void *out;                     // [B, N, heads, DV]
  const void *sinks;             // [heads] scores that take part in the sum and have no value, or NULL
  const int64_t *starts;         // [B + 1] if only the first nodes of each text have rows in q and out, which lie dense:
                                 // text b has rows starts[b] to starts[b + 1]; else NULL
  int64_t texts, heads, kv, n, columns, free, d, dv;  // free: columns before the mask's, which all nodes see
  int64_t qb, qh, qn, kb, kh, kt, vb, vh, vt, mb, mn;  // strides in numbers; the last index lies dense
  float scale, cap;  // a score is cap * tanh(score / cap), if the cap is not 0
  int half, threads;
} Attention;

INLINE F capped(F x, float cap) {  // by exp(-2 |x / cap|), which is 1 at most
  x /= cap;
  F size = (F)((U)x & 0x7fffffffu), small = exponential(size * -2.0f), y = (1.0f - small) / (1.0f + small) * cap;
  return (F)((U)y | ((U)x & 0x80000000u));
}

// Rows and vectors whose sums a loop holds in registers; keys of a strip, whose values stay in a near cache; the fewest
// rows of a unit where there are more, and the most.
#if L == 16 || defined(__aarch64__)
#define WIDTH 4
#else
#define WIDTH 2
#endif
enum { HIGH = 6, LOW = 4, STRIP = 64, TILES = STRIP / L, FEWEST = 24, MOST = 144, DIRECT = 18 };

// Numbers of two vectors; those of the second count from L on. Places that are known when this is compiled make the
// fastest shuffles, so they are written out: f(0, s), f(1, s), ...
#ifdef __clang__
#define MIXED(first, second, ...) __builtin_shufflevector(first, second, __VA_ARGS__)
#else
#define MIXED(first, second, ...) __builtin_shuffle(first, second, (U){__VA_ARGS__})
#endif
#define FOUR(f, s, j) f(j, s), f(j + 1, s), f(j + 2, s), f(j + 3, s)
#if L == 16
#define PLACES(f, s) FOUR(f, s, 0), FOUR(f, s, 4), FOUR(f, s, 8), FOUR(f, s, 12)
#elif L == 8
#define PLACES(f, s) FOUR(f, s, 0), FOUR(f, s, 4)
#else
#define PLACES(f, s) FOUR(f, s, 0)
#endif
#define UPPER(j, s) ((j) & (s) ? L + (j) - (s) : (j))
#define LOWER(j, s) ((j) & (s) ? L + (j) : (j) + (s))

// Rows that lie s apart exchange numbers: a0 a1 a2 a3, b0 b1 b2 b3 become a0 b0 a2 b2, a1 b1 a3 b3 with s = 1.
#define EXCHANGE(s) \
  for (int i = 0; i < L; i++) { \
    if (i & s) continue; \
    U first = rows[i], second = rows[i + s]; \
    rows[i] = MIXED(first, second, PLACES(UPPER, s)); \
    rows[i + s] = MIXED(first, second, PLACES(LOWER, s)); \
  }

// L rows of L numbers of 32 bits become L columns.
INLINE void transpose(U *rows) {
  UNROLL
  EXCHANGE(1)
  UNROLL
  EXCHANGE(2)
#if L > 4
  UNROLL
  EXCHANGE(4)
#endif
#if L > 8
  UNROLL
  EXCHANGE(8)
#endif
}

// turned [d, L] in rows of `step`: `many` rows of x that begin at numbers at[0], at[1], ...; further ones are 0. A row of
// bfloat16 is read as pairs.
static void turn_rows(const void *x, const int64_t *at, int many, int64_t d, int half, float *turned, int64_t step) {
  int numbers = half ? 2 : 1, size = half ? 2 : 4;
  if (d % (numbers * L)) {
    for (int c = 0; c < L; c++)
      for (int64_t i = 0; i < d; i++) turned[i * step + c] = c < many ? get(x, at[c] + i, half) : 0;
    return;
  }
  for (int64_t i = 0; i < d; i += numbers * L) {
    U block[L];
    for (int c = 0; c < L; c++) block[c] = c < many ? *(const U *)((const char *)x + (at[c] + i) * size) : (U){};
    transpose(block);
    for (int j = 0; j < L; j++)
      if (half) {
        *(U *)(turned + (i + 2 * j) * step) = block[j] << 16;
        *(U *)(turned + (i + 2 * j + 1) * step) = block[j] & 0xffff0000u;
      } else *(U *)(turned + (i + j) * step) = block[j];
  }
}

// Keeps a vector in a register. Without it gcc reads a column again from memory for each row.
#if defined(__AVX512F__)
#define KEEP(x) __asm__("" : "+v"(x))
#elif defined(__x86_64__)
#define KEEP(x) __asm__("" : "+x"(x))
#else
#define KEEP(x) (void)(x)
#endif

// A product of two matrices that is added to `sums`.
typedef struct {
  const float *numbers;  // [depth, rows], in rows of `lot`
  const void *columns;   // [depth, vectors * L], in rows of `step`; in bfloat16 (`half`) for at most LOW rows
  float *sums;           // [rows, vectors * L], in rows of `wide`
  int64_t depth, lot, step, wide;
  int half;
} Product;

// Each sum takes its products one after the other.
INLINE void sum_products(const Product *p, int half, int rows, int vectors) {
  int64_t depth = p->depth, lot = p->lot, step = p->step;
  const float *numbers = p->numbers;
  F sum[HIGH][WIDTH];
  UNROLL
  for (int r = 0; r < rows; r++)
    UNROLL
    for (int j = 0; j < vectors; j++) sum[r][j] = *(F *)(p->sums + r * p->wide + j * L);
  for (int64_t i = 0; i < depth; i++, numbers += lot) {
    F column[WIDTH];
    UNROLL
    for (int j = 0; j < vectors; j++) {
      column[j] = load(p->columns, i * step + j * L, half);
      KEEP(column[j]);
    }
    UNROLL
    for (int r = 0; r < rows; r++)
      UNROLL
      for (int j = 0; j < vectors; j++) sum[r][j] = add(column[j], all(numbers[r]), sum[r][j]);
  }
  UNROLL
  for (int r = 0; r < rows; r++)
    UNROLL
    for (int j = 0; j < vectors; j++) *(F *)(p->sums + r * p->wide + j * L) = sum[r][j];
}

#define VECTORS(v) case v: \
  if (rows > LOW && p->half) sum_products(p, 1, HIGH, v); \
  else if (rows > LOW) sum_products(p, 0, HIGH, v); \
  else if (p->half) sum_products(p, 1, LOW, v); \
  else sum_products(p, 0, LOW, v); \
  break;
static void add_product(const Product *p, int rows, int vectors) {  // of 1 to HIGH rows, 1 to WIDTH vectors
  switch (vectors) {
    VECTORS(1) VECTORS(2)
#if WIDTH == 4
    VECTORS(3) VECTORS(4)
#endif
  }
}

// The rows of the next loop, of those that are left: 8 are two times LOW.
static int rows_at_once(int64_t left) { return left > HIGH && left <= 2 * LOW ? LOW : MIN(HIGH, left); }

// A unit: rows of a key and value head of text b. Row i is of node i / heads of a group, and head i % these.
typedef struct {
  const Attention *a;
  int64_t b, head, first, rows;  // of all rows of the head, the unit has `rows` from `first` on
  int64_t groups, blocks;        // heads of a group; blocks of L rows, of which the last may not be full
  int64_t lot, vectors;          // room for rows; vectors of a row of values
  int *nodes;                    // [rows]: node of each row, from the unit's first on
  float *queries;                // [d, lot]
  float *keys;                   // [d, WIDTH, L]: tiles side by side
  float *mask;                   // [nodes, STRIP]: of a strip
  float *scores;                 // [tiles, rows, L]; of all units where threads share them
  float *weights;                // [STRIP, lot]: of a strip, key by key
  float *values;                 // [vectors / WIDTH, STRIP, WIDTH, L]
  float *out;                    // [lot, vectors, L]
  F *largest, *total;            // [rows] a score for all lanes; [blocks] a lane for each row
  unsigned char *seen;           // [strips, blocks + 2]: the tiles up to the last one that a row of each block sees; then
                                 // the most of all blocks; then whether the mask changes a score
} Unit;

static int64_t nodes_of(const Attention *a, int64_t b) {  // nodes of text b that have rows
  return a->starts ? a->starts[b + 1] - a->starts[b] : a->n;
}

static int64_t strips_of(const Attention *a) { return (a->columns + STRIP - 1) / STRIP; }

static int64_t node_of(const Unit *u, int64_t r) { return (u->first + r) / u->groups; }

static int64_t head_of(const Unit *u, int64_t r) { return u->head * u->groups + (u->first + r) % u->groups; }

static unsigned char *seen_of(const Unit *u, int64_t strip) { return u->seen + strip * (u->blocks + 2); }

// The tiles that some of at most HIGH rows from r on see; they lie in two blocks at most.
static int tiles_of(const unsigned char *seen, int64_t r, int rows) { return MAX(seen[r / L], seen[(r + rows - 1) / L]); }

static void read_queries(const Unit *u) {
  const Attention *a = u->a;
  int64_t text = a->starts ? a->starts[u->b] * a->qn : u->b * a->qb, at[L];
  for (int64_t r = 0; r < u->rows; r += L) {
    int many = MIN(L, u->rows - r);
    for (int i = 0; i < many; i++) at[i] = text + node_of(u, r + i) * a->qn + head_of(u, r + i) * a->qh;
    turn_rows(a->q, at, many, a->d, a->half, u->queries + r, u->lot);
  }
}

// The mask of L columns of a node; columns that are not there are hidden.
INLINE F mask_of(const Unit *u, int64_t node, int64_t column) {
  const Attention *a = u->a;
  int64_t at = u->b * a->mb + node * a->mn + column - a->free, open = a->free - column, many = a->columns - column;
  if (open >= L) return all(0);
  if (open <= 0 && many >= L) return load(a->mask, at, a->half);
  F mask = all(-INFINITY);
  for (int c = 0; c < MIN(L, many); c++) mask[c] = c < open ? 0 : get(a->mask, at + c, a->half);
  return mask;
}

// Notes which tiles of each strip the blocks of rows see. Reads the mask row by row, as it lies in memory.
static void look_for_keys(const Unit *u) {
  const Attention *a = u->a;
  int64_t strips = strips_of(a), first = u->first / u->groups;
  memset(u->seen, 0, strips * (u->blocks + 2));
  for (int64_t from = 0, to = 0; from < u->rows; from = to) {  // the rows of a node
    while (to < u->rows && u->nodes[to] == u->nodes[from]) to++;
    for (int64_t strip = 0; strip < strips; strip++) {
      unsigned char *seen = seen_of(u, strip);
      int tiles = 0;
      I masked = {};
      for (int t = 0; t < TILES; t++) {
        F mask = mask_of(u, first + u->nodes[from], strip * STRIP + t * L);
        masked |= mask != 0.0f;
        if (any(mask > -1e30f)) tiles = t + 1;
      }
      for (int64_t block = from / L; block <= (to - 1) / L; block++) seen[block] = MAX(seen[block], tiles);
      seen[u->blocks] = MAX(seen[u->blocks], tiles);
      seen[u->blocks + 1] |= any(masked);
    }
  }
}

static void read_mask(const Unit *u, int64_t strip) {
  int64_t first = u->first / u->groups, nodes = u->nodes[u->rows - 1] + 1;
  for (int64_t node = 0; node < nodes; node++)
    for (int t = 0; t < TILES; t++)
      *(F *)(u->mask + node * STRIP + t * L) = mask_of(u, first + node, strip * STRIP + t * L);
}

// Asks for `many` rows of x from number `at` on, into the second level of caches.
INLINE void ask_for(const void *x, int64_t at, int64_t many, int64_t row, int64_t width, int half) {
  int64_t size = half ? 2 : 4;
  for (int64_t c = 0; c < many; c++)
    for (int64_t i = 0; i < width * size; i += 64) __builtin_prefetch((const char *)x + (at + c * row) * size + i, 0, 2);
}

// Scores of `rows` rows from r on with `vectors` tiles of a strip from tile t on: scaled, masked, and the largest.
static void score_rows(const Unit *u, int64_t strip, int t, int vectors, int64_t r, int rows, int masked) {
  const Attention *a = u->a;
  float sums[HIGH * WIDTH * L] __attribute__((aligned(64))) = {};
  Product p = {u->queries + r, u->keys, sums, .depth = a->d, .lot = u->lot, .step = WIDTH * L, .wide = WIDTH * L};
  add_product(&p, rows, vectors);
  for (int i = 0; i < rows; i++) {
    const float *mask = masked ? u->mask + u->nodes[r + i] * STRIP + t * L : NULL;
    float *scores = u->scores + ((strip * TILES + t) * u->rows + r + i) * L;
    F largest = u->largest[r + i];
    for (int j = 0; j < vectors; j++) {
      F sum = *(F *)(sums + (i * WIDTH + j) * L), hidden = mask ? *(const F *)(mask + j * L) : all(0);
      F score = add(sum, all(a->scale), hidden);
      if (a->cap) score = capped(sum * a->scale, a->cap) + hidden;
      *(F *)(scores + j * u->rows * L) = score;
      largest = larger(score, largest);
    }
    u->largest[r + i] = largest;
  }
}

static void score_strip(const Unit *u, int64_t strip) {
  const Attention *a = u->a;
  const unsigned char *seen = seen_of(u, strip);
  int64_t head = u->b * a->kb + u->head * a->kh;
  int most = seen[u->blocks], masked = seen[u->blocks + 1];
  if (most && masked) read_mask(u, strip);
  for (int t = 0; t < most; t += WIDTH) {
    for (int j = 0; j < MIN(WIDTH, most - t); j++) {
      int64_t column = strip * STRIP + (t + j) * L, at[L];
      for (int c = 0; c < L; c++) at[c] = head + (column + c) * a->kt;
      ask_for(a->k, at[0] + 2 * WIDTH * L * a->kt, L, a->kt, a->d, a->half);
      turn_rows(a->k, at, MIN(L, a->columns - column), a->d, a->half, u->keys + j * L, WIDTH * L);
    }
    for (int64_t r = 0; r < u->rows; r += rows_at_once(u->rows - r)) {
      int rows = rows_at_once(u->rows - r), tiles = tiles_of(seen, r, rows) - t;
      if (tiles > 0) score_rows(u, strip, t, MIN(WIDTH, tiles), r, rows, masked);
    }
  }
}

// The largest score of each row in all lanes, and what a sink adds to its sum.
static void find_largest(const Unit *u) {
  const Attention *a = u->a;
  for (int64_t r = 0; r < u->rows; r++) {
    float most = u->largest[r][0];
    for (int c = 1; c < L; c++) most = u->largest[r][c] > most ? u->largest[r][c] : most;
    if (a->sinks) {
      float sink = get(a->sinks, head_of(u, r), a->half);
      most = sink > most ? sink : most;
      u->total[r / L][r % L] = exponential(all(sink - most))[0];
    }
    u->largest[r] = all(most);
  }
}

// The weights of `rows` rows for a tile: exponentials of the scores [rows, L], as weights [L, lot]. Returns the sums of
// rows, which take them key by key.
INLINE F weigh_tile(const float *scores, const F *largest, int rows, float *weights, int64_t lot, F total) {
  U tile[L];
  UNROLL
  for (int r = 0; r < L; r++) tile[r] = r < rows ? (U)exponential(*(const F *)(scores + r * L) - largest[r]) : (U){};
  transpose(tile);
  UNROLL
  for (int c = 0; c < L; c++) {
    total += (F)tile[c];
    *(U *)(weights + c * lot) = tile[c];
  }
  return total;
}

static void weigh_strip(const Unit *u, int64_t strip) {
  const unsigned char *seen = seen_of(u, strip);
  for (int t = 0; t < seen[u->blocks]; t++)
    for (int64_t block = 0; block < u->blocks; block++) {
      const float *scores = u->scores + ((strip * TILES + t) * u->rows + block * L) * L;
      float *weights = u->weights + t * L * u->lot + block * L;
      const F *largest = u->largest + block * L;
      F *total = u->total + block;
      int rows = t < seen[block] ? MIN(L, u->rows - block * L) : 0;
      if (rows == L) *total = weigh_tile(scores, largest, L, weights, u->lot, *total);
      else *total = weigh_tile(scores, largest, rows, weights, u->lot, *total);
    }
}

// L values from i on of the row that begins at `at`; further ones are 0.
INLINE F value_of(const Attention *a, int64_t at, int64_t i) {
  if (i + L <= a->dv) return load(a->v, at + i, a->half);
  F values = {};
  for (int j = 0; j < a->dv - i; j++) values[j] = get(a->v, at + i + j, a->half);
  return values;
}

// Where vector i of the first key of a strip lies: WIDTH vectors of a key lie beside those of the next.
static float *vector_of(const Unit *u, int64_t i) { return u->values + (i / WIDTH * STRIP * WIDTH + i % WIDTH) * L; }

// Vectors [first, end) of `many` keys from number `at` on, as they are summed.
INLINE void copy_values(const Unit *u, int64_t at, int64_t many, int64_t first, int64_t end, int half) {
  const Attention *a = u->a;
  for (int64_t i = first; i < end; i++) {
    float *to = vector_of(u, i);
    int whole = (i + 1) * L <= a->dv;
    for (int64_t c = 0, key = at; c < many; c++, key += a->vt)
      *(F *)(to + c * WIDTH * L) = whole ? load(a->v, key + i * L, half) : value_of(a, key, i * L);
  }
}

static void read_values(const Unit *u, int64_t at, int64_t many, int64_t first, int64_t end) {
  if (u->a->half) copy_values(u, at, many, first, end, 1);
  else copy_values(u, at, many, first, end, 0);
}

// Adds the values of a strip, each times its weight: vectors [first, end). Few rows read each value where it lies.
static void add_values(const Unit *u, int64_t strip, int64_t first, int64_t end) {
  const Attention *a = u->a;
  const unsigned char *seen = seen_of(u, strip);
  int64_t at = u->b * a->vb + u->head * a->vh + strip * STRIP * a->vt, left = a->columns - strip * STRIP;
  int direct = u->rows <= DIRECT && a->dv % L == 0;
  if (!direct) read_values(u, at, MIN(seen[u->blocks] * L, left), first, end);
  for (int64_t from = first, many; from < end; from += many) {
    many = MIN(WIDTH - from % WIDTH, end - from);
    Product p = {.columns = vector_of(u, from), .lot = u->lot, .step = WIDTH * L, .wide = u->vectors * L};
    if (direct) p.columns = (const char *)a->v + (at + from * L) * (a->half ? 2 : 4), p.step = a->vt, p.half = a->half;
    int64_t asked = STRIP * (from - first) / (end - first), last = STRIP * (from - first + many) / (end - first);
    // Asks for a part of the next strip.
    ask_for(a->v, at + (STRIP + asked) * a->vt + first * L, last - asked, a->vt, (end - first) * L, a->half);
    for (int64_t r = 0; r < u->rows; r += rows_at_once(u->rows - r)) {
      int rows = rows_at_once(u->rows - r);
      p.numbers = u->weights + r, p.sums = u->out + (r * u->vectors + from) * L;
      p.depth = MIN(tiles_of(seen, r, rows) * L, left);
      add_product(&p, rows, many);
    }
  }
}

static void write_rows(const Unit *u, int64_t first, int64_t end) {  // divides and rounds once
  const Attention *a = u->a;
  for (int64_t r = 0; r < u->rows; r++) {
    int64_t node = node_of(u, r) + (a->starts ? a->starts[u->b] : u->b * a->n), i = first * L, to = MIN(end * L, a->dv);
    int64_t at = (node * a->heads + head_of(u, r)) * a->dv;
    const float *out = u->out + r * u->vectors * L;
    float total = u->total[r / L][r % L];
    for (; i + L <= to; i += L) store(a->out, at + i, *(const F *)(out + i) / total, a->half);
    for (; i < to; i++) put(a->out, at + i, out[i] / total, a->half);
  }
}

// The rows of a unit of text b, for all of its heads: at most `each` from `first` on.
static void begin_nodes(Unit *u, int64_t b, int64_t first, int64_t each) {
  u->b = b, u->first = first;
  u->rows = MIN(each, u->groups * nodes_of(u->a, b) - first);
  u->blocks = (u->rows + L - 1) / L;
  for (int64_t r = 0; r < u->rows; r++) u->nodes[r] = (first + r) / u->groups - first / u->groups;
  if (u->rows > 0) look_for_keys(u);
}

static void begin_largest(const Unit *u) {
  for (int64_t r = 0; r < u->rows; r++) u->largest[r] = all(-INFINITY);
}

// The scores of strips [first, end).
static void score_strips(const Unit *u, int64_t first, int64_t end) {
  memset(u->queries, 0, u->a->d * u->lot * sizeof(float));
  read_queries(u);
  for (int64_t strip = first; strip < end; strip++) score_strip(u, strip);
}

// The sums of vectors [first, end) of the values over all strips, once all scores and their largest are known.
static void sum_values(const Unit *u, int64_t first, int64_t end) {
  const Attention *a = u->a;
  memset(u->total, 0, u->blocks * sizeof(F));
  memset(u->weights, 0, STRIP * u->lot * sizeof(float));
  memset(u->out, 0, u->lot * u->vectors * sizeof(F));
  ask_for(a->v, u->b * a->vb + u->head * a->vh + first * L, STRIP, a->vt, (end - first) * L, a->half);
  find_largest(u);
  for (int64_t strip = 0; strip < strips_of(a); strip++) {
    weigh_strip(u, strip);
    add_values(u, strip, first, end);
  }
  write_rows(u, first, end);
}

// Rows of a unit, nearly the same for all of a head: many, since keys and values are read anew for each unit; but four
// units or more for each of several threads, and at most 4 MB of scores.
static int64_t rows_of_a_unit(const Attention *a) {
  int64_t rows = a->heads / a->kv * a->n, near = (1 << 20) / (a->columns + 1), most = MIN(near, MOST);
  if (a->threads > 1) most = MIN(most, rows * a->kv * a->texts / (4 * a->threads));
  most = MAX(most, FEWEST);
  int64_t parts = (rows + most - 1) / most, each = (rows + parts - 1) / parts;
  return (each + HIGH - 1) / HIGH * HIGH;
}

// How the units are shared. Units of few rows over many keys are shared by all threads if they do not divide evenly.
typedef struct {
  int64_t each, parts, units;  // rows of a unit, units of a head, all units
  int64_t ranges, shares;      // of strips and of vectors: items of each pass over a unit; 0: a unit has one thread
} Sharing;

// Few rows wait for memory, however they are shared; and few scores are computed while threads meet.
enum { SHARED_ROWS = 8, SHARED_SCORES = 16384, RANGES = 8 };

static Sharing sharing_of(const Attention *a) {
  int64_t each = rows_of_a_unit(a), rows = a->heads / a->kv * a->n, parts = (rows + each - 1) / each;
  int64_t threads = a->threads, vectors = (a->dv + L - 1) / L, shares = 1;
  Sharing s = {each, parts, a->texts * a->kv * parts, 0, 0};
  if (rows < SHARED_ROWS || rows * a->columns < SHARED_SCORES) return s;
  if (s.units >= 4 * threads || s.units % threads == 0) return s;
  while (s.units * shares % threads && s.units * shares < 4 * threads && 2 * shares <= vectors) shares *= 2;
  s.ranges = RANGES, s.shares = shares;
  return s;
}

static int64_t scores_of_a_unit(const Attention *a, int64_t rows) { return strips_of(a) * STRIP * rows; }

// A unit of the most rows, whose parts lie in `room` one behind the other; but the scores of shared units lie elsewhere.
static Unit unit_in(const Attention *a, const Sharing *s, float *room, int64_t *floats) {
  int64_t rows = s->each, blocks = (rows + L - 1) / L, strips = strips_of(a);
  int64_t groups = a->heads / a->kv, vectors = (a->dv + L - 1) / L;
  int64_t lot = (rows + LOW + L - 1) / L * L;
  Unit u = {.a = a, .b = -1, .groups = groups, .lot = lot, .vectors = vectors};
  enum { NODES, QUERIES, KEYS, MASK, SCORES, WEIGHTS, VALUES, OUT, LARGEST, TOTAL, SEEN, PARTS };
  int64_t sizes[PARTS] = {
    rows, a->d * lot, a->d * WIDTH * L, (rows / groups + 2) * STRIP, s->shares ? 0 : scores_of_a_unit(a, rows), STRIP * lot,
    (vectors + WIDTH - 1) / WIDTH * WIDTH * STRIP * L, lot * vectors * L, rows * L, blocks * L, (strips * (blocks + 2) + 3) / 4,
  };
  float *at[PARTS];
  *floats = 0;
  for (int i = 0; i < PARTS; i++) {
    at[i] = room ? room + *floats : NULL;
    *floats += (sizes[i] + 15) / 16 * 16;
  }
  u.queries = at[QUERIES], u.keys = at[KEYS], u.mask = at[MASK], u.scores = at[SCORES], u.weights = at[WEIGHTS];
  u.values = at[VALUES], u.out = at[OUT], u.largest = (F *)at[LARGEST], u.total = (F *)at[TOTAL];
  u.seen = (unsigned char *)at[SEEN], u.nodes = (int *)at[NODES];
  return u;
}

// The room of each thread's units, in whole lines of the cache.
static int64_t floats_of_a_thread(const Attention *a, const Sharing *s) {
  int64_t floats;
  unit_in(a, s, NULL, &floats);
  return floats;
}

// The room of shared units: scores, and the largest of each range.
static int64_t floats_of_a_shared_unit(const Attention *a, const Sharing *s) {
  return scores_of_a_unit(a, s->each) + s->ranges * s->each * L;
}

static int64_t bytes_of_attention(const Attention *a) {  // the room of all threads
  Sharing s = sharing_of(a);
  int64_t shared = s.shares ? s.units * floats_of_a_shared_unit(a, &s) : 0;
  return 4 * (a->threads * floats_of_a_thread(a, &s) + shared);
}

// The last nodes of a text come first, since they see most; and all heads of the same nodes after each other, since they
// share a mask.
static void begin_unit(Unit *u, const Sharing *s, int64_t unit) {
  int64_t kv = u->a->kv, b = unit / kv / s->parts, first = (s->parts - 1 - unit / kv % s->parts) * s->each;
  u->head = unit % kv;
  if (u->b != b || u->first != first) begin_nodes(u, b, first, s->each);
}

static void attend_shared(Unit *u, const Sharing *s, float *shared, Team *team) {
  const Attention *a = u->a;
  int64_t strips = strips_of(a), floats = floats_of_a_shared_unit(a, s);
  F *largest = u->largest;

  // 1. The scores, and the largest of each range of strips.
  for (int64_t i = take_next(team); i < s->units * s->ranges; i = take_next(team)) {
    int64_t unit = i / s->ranges, range = i % s->ranges;
    begin_unit(u, s, unit);
    u->scores = shared + unit * floats;
    u->largest = (F *)(u->scores + scores_of_a_unit(a, s->each)) + range * s->each;
    begin_largest(u);
    score_strips(u, strips * range / s->ranges, strips * (range + 1) / s->ranges);
  }
  meet(team);

  // 2. The largest of all ranges, and the values.
  u->largest = largest;
  for (int64_t i = take_next(team); i < s->units * s->shares; i = take_next(team)) {
    int64_t unit = i / s->shares, share = i % s->shares;
    begin_unit(u, s, unit);
    u->scores = shared + unit * floats;
    const F *largest_of_range = (F *)(u->scores + scores_of_a_unit(a, s->each));
    begin_largest(u);
    for (int64_t range = 0; range < s->ranges; range++)
      for (int64_t r = 0; r < u->rows; r++)
        u->largest[r] = larger(largest_of_range[range * s->each + r], u->largest[r]);
    if (u->rows > 0) sum_values(u, u->vectors * share / s->shares, u->vectors * (share + 1) / s->shares);
  }
}

// The part of this thread of a region; all threads call it. room: of all threads.
static void attend(const Attention *a, float *room, Team *team) {
  Sharing s = sharing_of(a);
  int64_t floats = floats_of_a_thread(a, &s);
  Unit u = unit_in(a, &s, room + omp_get_thread_num() * floats, &floats);
  if (s.shares) {
    attend_shared(&u, &s, room + a->threads * floats, team);
    return;
  }
  for (int64_t i = take_next(team); i < s.units; i = take_next(team)) {
    begin_unit(&u, &s, i);
    if (u.rows <= 0) continue;
    begin_largest(&u);
    score_strips(&u, 0, strips_of(a));
    sum_values(&u, 0, u.vectors);
  }
}

int attention(const Attention *a) {
  float *room = take_room(bytes_of_attention(a));
  if (!room) return NO_MEMORY;
  Team team = {};
  int threads = choose_threads(a->threads);
  double begun = omp_get_wtime();
#pragma omp parallel num_threads(threads)
  {
    attend(a, room, &team);
    meet(&team);
  }
  end_region(&team, threads, begun);
  free(room);
  return DONE;
}
