// A decoder layer in one parallel region: the kernels of kernels.c, and what lies between them.
//
//   x -> norm -> queries, keys, values -> rotation -> attention -> product -> + x = h
//   h -> norm -> gate, up -> silu(gate) * up -> product -> + h = y
//
// Each result is rounded where torch rounds it, so the layer has the bits of its own modules.

#include "kernels.c"

enum { QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, PRODUCTS };
enum { BEFORE_ATTENTION, BEFORE_MLP, OF_QUERIES, OF_KEYS, NORMS };

typedef struct {
  const void *weights[PRODUCTS], *biases[PRODUCTS];  // a bias may be NULL
  const void *norms[NORMS];                          // weights; NULL for none
  const void *x, *residual;     // [B, N, in], [B, N, hidden]: x itself, or what is added to the attention
  const void *cos, *sin, *mask; // [B or 1, N or 1, turned] both, [B or 1, N, columns - first - free] additive
  void *keys, *values, *y;      // [B, KV, capacity, D] both: N columns are written before `columns`; [B, N, hidden]
  const int64_t *starts;        // [B + 1] if x, residual and y have rows of only the first nodes of each text:
                                // starts[b] to starts[b + 1]; NULL: of all
  int64_t texts, n, in, hidden, heads, kv, d, inner, turned, columns, capacity;
  int64_t first, free;          // columns before `first` are not attended to; all nodes see the next `free`, without a mask
  int64_t ab, an, mb, mn;       // strides of a text and of a node in angles and mask
  float scale, eps, sign;       // sign: of the first half's sines, -1 unless they are negated already
  int form, half, threads;
} Layer;

static int64_t rows_in(const Layer *a) { return a->starts ? a->starts[a->texts] : a->texts * a->n; }

static int64_t text_of(const Layer *a, int64_t r) {  // the text of row r
  if (!a->starts) return r / a->n;
  int64_t b = 0;
  while (a->starts[b + 1] <= r) b++;
  return b;
}

// Norm of each row, if there is a weight, and the rows as products read them. All threads call it.
static void read_rows(const Layer *a, const void *x, int norm, char *normed, const Rows *f, char *rows) {
#pragma omp for
  for (int64_t r = 0; r < rows_in(a); r++) {
    if (a->norms[norm]) norm_row(x, a->norms[norm], normed, r, f->in, a->eps, a->half);
    read_row(f, a->norms[norm] ? normed : x, rows, r);
  }
}

// Numbers [width] at x turned by `cos` and `sin` [turned] from `at` on, to `y`.
static void turn(const Layer *a, const char *x, int64_t at, char *y) {
  int64_t middle = a->turned / 2, size = a->half ? 2 : 4;
  float rotated[a->d];
  for (int64_t i = 0; i < a->turned; i++) {
    float pair[1], other = i < middle ? a->sign * get(x, i + middle, a->half) : get(x, i - middle, a->half);
    put(pair, 0, other * get(a->sin, at + i, a->half), a->half);
    float beside = get(pair, 0, a->half);
    put(pair, 0, get(x, i, a->half) * get(a->cos, at + i, a->half), a->half);
    rotated[i] = get(pair, 0, a->half) + beside;
  }
  for (int64_t i = 0; i < a->turned; i++) put(y, i, rotated[i], a->half);
  memmove(y + a->turned * size, x + a->turned * size, (a->d - a->turned) * size);
}

// Head `head` of the queries, then of the keys, then of the values, of row r. Keys and values go to the cache.
static void place(const Layer *a, char *q, char *k, char *v, int64_t r, int64_t head) {
  int64_t size = a->half ? 2 : 4, row = a->d * size, b = text_of(a, r);
  int64_t node = r - (a->starts ? a->starts[b] : b * a->n);
  int64_t angle = b * a->ab + node * a->an, column = a->columns - a->n + node;
  int key = head >= a->heads, value = head >= a->heads + a->kv, norm = key ? OF_KEYS : OF_QUERIES;
  char *x = q + (r * a->heads + head) * row, *to = x;
  if (key) {
    int64_t own = head - a->heads - (value ? a->kv : 0);
    x = (value ? v : k) + (r * a->kv + own) * row;
    to = (char *)(value ? a->values : a->keys) + ((b * a->kv + own) * a->capacity + column) * row;
  }
  if (value) { memcpy(to, x, row); return; }
  if (a->norms[norm]) norm_row(x, a->norms[norm], x, 0, a->d, a->eps, a->half);
  turn(a, x, angle, to);
}

// Numbers of thread t: z = x + y, in rows of `hidden`.
static void add_rows(const Layer *a, const void *x, const void *y, void *z, int t) {
  int64_t from = first_of(a->hidden, a->threads, t), to = first_of(a->hidden, a->threads, t + 1);
  for (int64_t r = 0; r < rows_in(a); r++)
    for (int64_t i = r * a->hidden + from; i < r * a->hidden + to; i++)
      put(z, i, get(x, i, a->half) + get(y, i, a->half), a->half);
}

INLINE F rounded(F x, int half) {
  uint16_t bits[L];
  if (!half) return x;
  store(bits, 0, x, 1);
  return load(bits, 0, 1);
}

INLINE F silu(F x) {  // x / (1 + exp(-x)); in bfloat16 it has the bits of torch's
  I negative = x < 0.0f;
  F e = exponential((F)((U)x | 0x80000000u));  // of -|x|
  F y = (F)(((U)x & ~(U)negative) | ((U)(x * e) & (U)negative)) / (e + 1.0f);
  I tail = x < -87.0f;  // for which `exponential` gave 0
  for (int c = 0; c < L && any(tail); c++)
    if (tail[c]) y[c] = x[c] / (1 + expf(-x[c]));
  return y;
}

// Outputs of thread t: silu(gate) * up, as the last product reads them.
static void activate(const Layer *a, const void *gate, const void *up, const Rows *f, char *rows, int t) {
  int64_t from = first_of(a->inner, a->threads, t), to = first_of(a->inner, a->threads, t + 1);
  for (int64_t r = 0; r < rows_in(a); r++) {
    for (int64_t i = from; i < to; i += L) {
      int64_t at = r * a->inner + i, size = f->size;
      char *to_row = rows + (r * f->width + i) * size;
      if (i + L <= to) {
        F x = rounded(silu(load(gate, at, a->half)), a->half);
        store(to_row, 0, rounded(x * load(up, at, a->half), a->half), size == 2);
      } else for (int64_t c = 0; c < to - i; c++) {
        F x = rounded(silu(all(get(gate, at + c, a->half))), a->half);
        put(to_row, c, rounded(x * get(up, at + c, a->half), a->half)[0], size == 2);
      }
    }
    if (!t) memset(rows + (r * f->width + f->in) * f->size, 0, (f->width - f->in) * f->size);
  }
}

static int layer(const Layer *a) {
  // 1. The products, and how they read rows.
  int64_t size = a->half ? 2 : 4, n = rows_in(a), all_heads = a->heads * a->d, groups = a->kv * a->d;
  if (!n) return DONE;
  int64_t outs[PRODUCTS] = {all_heads, groups, groups, a->hidden, a->inner, a->inner, a->hidden};
  int64_t ins[PRODUCTS] = {a->in, a->in, a->in, all_heads, a->hidden, a->hidden, a->inner};
  Linear p[PRODUCTS];
  Rows f[PRODUCTS];
  for (int i = 0; i < PRODUCTS; i++) {
    p[i] = (Linear){a->weights[i], a->biases[i], ins[i], outs[i], a->form, a->half, a->threads};
    f[i] = rows_for(ins[i], a->form, a->half);
  }

  // 2. Room for what each step gives, and for each thread's attention.
  Attention seen = {
    .k = (char *)a->keys + a->first * a->d * size, .v = (char *)a->values + a->first * a->d * size,
    .mask = a->mask, .starts = a->starts, .texts = a->texts, .heads = a->heads, .kv = a->kv, .n = a->n,
    .columns = a->columns - a->first, .free = a->free, .d = a->d, .dv = a->d,
    .qb = a->n * all_heads, .qh = a->d, .qn = all_heads, .mb = a->mb, .mn = a->mn,
    .kb = groups * a->capacity, .kh = a->d * a->capacity, .kt = a->d,
    .vb = groups * a->capacity, .vh = a->d * a->capacity, .vt = a->d,
    .scale = a->scale, .half = a->half, .threads = a->threads,
  };
  enum { ROWS_IN, ROWS_OUT, ROWS_MID, ROWS_DOWN, NORMED, Q, K, V, ATTENDED, ADDED, H_, G, U_, SCORES, PARTS };
  int64_t all_rows = padded(&f[0], n), width = MAX(a->in, a->hidden);
  int64_t sizes[PARTS] = {
    all_rows * f[QUERY].width * f[QUERY].size, all_rows * f[OUTPUT].width * f[OUTPUT].size,
    all_rows * f[GATE].width * f[GATE].size, all_rows * f[DOWN].width * f[DOWN].size, n * width * size,
    n * all_heads * size, n * groups * size, n * groups * size, n * all_heads * size,
    n * a->hidden * size, n * a->hidden * size, n * a->inner * size, n * a->inner * size,
    4 * a->threads * floats_of_a_thread(&seen),
  };
  char *at[PARTS];
  int64_t whole = 0;
  for (int i = 0; i < PARTS; i++) whole += (sizes[i] + 63) / 64 * 64;
  char *room = take_room(whole);
  if (!room) return NO_MEMORY;
  for (int64_t i = 0, used = 0; i < PARTS; used += (sizes[i++] + 63) / 64 * 64) at[i] = room + used;
  seen.q = at[Q], seen.out = at[ATTENDED];

  // 3. The layer. A loop over t gives each thread the same outputs of two products.
#pragma omp parallel num_threads(a->threads)
  {
    read_rows(a, a->x, BEFORE_ATTENTION, at[NORMED], &f[QUERY], at[ROWS_IN]);
#pragma omp for schedule(static, 1)
    for (int t = 0; t < a->threads; t++)
      for (int i = QUERY; i <= VALUE; i++) share(&p[i], &f[i], at[ROWS_IN], at[Q + i], n, t);
#pragma omp for
    for (int64_t i = 0; i < n * (a->heads + 2 * a->kv); i++)
      place(a, at[Q], at[K], at[V], i / (a->heads + 2 * a->kv), i % (a->heads + 2 * a->kv));
    attend(&seen, (float *)at[SCORES]);
#pragma omp for
    for (int64_t r = 0; r < n; r++) read_row(&f[OUTPUT], at[ATTENDED], at[ROWS_OUT], r);
#pragma omp for schedule(static, 1)
    for (int t = 0; t < a->threads; t++) {
      share(&p[OUTPUT], &f[OUTPUT], at[ROWS_OUT], at[ADDED], n, t);
      add_rows(a, a->residual, at[ADDED], at[H_], t);
    }
    read_rows(a, at[H_], BEFORE_MLP, at[NORMED], &f[GATE], at[ROWS_MID]);
#pragma omp for schedule(static, 1)
    for (int t = 0; t < a->threads; t++) {
      share(&p[GATE], &f[GATE], at[ROWS_MID], at[G], n, t);
      share(&p[UP], &f[UP], at[ROWS_MID], at[U_], n, t);
      activate(a, at[G], at[U_], &f[DOWN], at[ROWS_DOWN], t);
    }
#pragma omp for schedule(static, 1)
    for (int t = 0; t < a->threads; t++) {
      share(&p[DOWN], &f[DOWN], at[ROWS_DOWN], at[ADDED], n, t);
      add_rows(a, at[H_], at[ADDED], a->y, t);
    }
  }
  free(room);
  return DONE;
}

// Layers in a row: each writes `y` after all have read `x` and `residual`, which may be the same rows.
int layers(const Layer *a, int64_t many) {
  for (int64_t i = 0; i < many; i++)
    if (layer(a + i)) return NO_MEMORY;
  return DONE;
}

// A step of an EAGLE head over nodes of several texts: [embedding, feature] -> input -> layer -> state -> output -> logits.
typedef struct {
  Layer layer;            // without the fields that `HeadNodes` has
  Linear input, output;
  const void *embedding;  // [V, hidden]
} HeadStep;

typedef struct {
  const int64_t *tokens, *parents;     // [R] of all texts, one after the other; node i reads row parents[i] of the features
  const int64_t *positions;            // [R]: the rows of `cos` and `sin`
  const int64_t *starts;               // [B + 1] as in `Layer`
  const int64_t *drafted;              // [rows]: the rows of the states whose logits are computed
  const int64_t *vocabulary;           // the target's token for each of `tokens`; NULL: itself
  const void *features;                // [.., hidden]
  const void *cos, *sin;               // [positions, turned]
  const void *mask;                    // as in `Layer`
  void *keys, *values, *states;        // as in `Layer`; [R, hidden]
  void *last, *logits;                 // [rows, hidden], [rows, drafted tokens]
  int64_t texts, n, rows, turned, columns, capacity, free, threads;  // n: the most nodes of a text
} HeadNodes;

int head_step(const HeadStep *head, const HeadNodes *nodes) {
  // 1. Pairs [embedding, feature], and room for what the input gives. Angles lie as [B, N].
  Layer a = head->layer;
  Linear input = head->input, output = head->output;
  int64_t n = nodes->n, all = nodes->starts[nodes->texts], size = a.half ? 2 : 4, row = a.hidden * size;
  int64_t angles = nodes->turned * size;
  if (!all) return DONE;
  char *room = malloc(3 * all * row + 2 * nodes->texts * n * angles);
  if (!room) return NO_MEMORY;
  char *pairs = room, *x = pairs + 2 * all * row, *cos = x + all * row, *sin = cos + nodes->texts * n * angles;
  for (int64_t b = 0; b < nodes->texts; b++)
    for (int64_t i = nodes->starts[b]; i < nodes->starts[b + 1]; i++) {
      int64_t token = nodes->vocabulary ? nodes->vocabulary[nodes->tokens[i]] : nodes->tokens[i];
      int64_t place = (b * n + i - nodes->starts[b]) * angles, position = nodes->positions[i];
      memcpy(pairs + 2 * i * row, (const char *)head->embedding + token * row, row);
      memcpy(pairs + (2 * i + 1) * row, (const char *)nodes->features + nodes->parents[i] * row, row);
      memcpy(cos + place, (const char *)nodes->cos + position * angles, angles);
      memcpy(sin + place, (const char *)nodes->sin + position * angles, angles);
    }

  // 2. The layer.
  input.threads = output.threads = a.threads = nodes->threads;
  int failed = linear(&input, pairs, x, all);
  a.x = a.residual = x, a.y = nodes->states, a.starts = nodes->starts;
  a.cos = cos, a.sin = sin, a.mask = nodes->mask;
  a.keys = nodes->keys, a.values = nodes->values;
  a.texts = nodes->texts, a.n = n, a.turned = nodes->turned, a.columns = nodes->columns, a.capacity = nodes->capacity;
  a.free = nodes->free, a.an = nodes->turned, a.ab = n * a.an, a.mn = nodes->columns - nodes->free, a.mb = n * a.mn;
  if (!failed) failed = layer(&a);

  // 3. The logits.
  for (int64_t i = 0; i < nodes->rows && !failed; i++)
    memcpy((char *)nodes->last + i * row, (const char *)nodes->states + nodes->drafted[i] * row, row);
  if (!failed) failed = linear(&output, nodes->last, nodes->logits, nodes->rows);
  free(room);
  return failed;
}

enum { ABI = 1 };  // counted up when a structure or a parameter changes, here and in structs.py

// Writes the sizes [5] of the structures in bytes; returns the ABI.
int describe_abi(int64_t *sizes) {
  sizes[0] = sizeof(Linear), sizes[1] = sizeof(Attention), sizes[2] = sizeof(Layer);
  sizes[3] = sizeof(HeadStep), sizes[4] = sizeof(HeadNodes);
  return ABI;
}
