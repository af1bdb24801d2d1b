// A decoder layer in one parallel region: the kernels of kernels.c, and what lies between them.
//
//   x -> norm -> queries, keys, values -> rotation -> attention -> product -> + x = h
//   h -> norm -> gate, up -> silu(gate) * up -> product -> + h = y
//
// Each result is rounded where torch rounds it, so the layer has the bits of its own modules.

#include "kernels.c"

enum { QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, PRODUCTS };
enum { BEFORE_ATTENTION, BEFORE_MLP, OF_QUERIES, OF_KEYS, NORMS };

typedef struct {                                     // a decoder layer
  const void *weights[PRODUCTS], *biases[PRODUCTS];  // a bias may be NULL
  const void *norms[NORMS];                          // weights; NULL for none
  int64_t in, hidden, heads, kv, d, inner;
  float scale, eps, sign;  // sign: of the first half's sines, -1 unless they are negated already
  int forms[PRODUCTS];     // products of the same rows read them the same way
  int half;
} Layer;

typedef struct {         // a layer's cache in a forward
  void *keys, *values;   // [B, KV, capacity, D] both: N columns are written before `columns`
  int64_t columns, capacity, first;  // columns before `first` are not attended to
} Cache;

typedef struct {                 // what the layers of a forward share
  const void *x, *residual;      // [B, N, in], [B, N, hidden]: x itself, or what is added to the attention
  const void *cos, *sin, *mask;  // [B or 1, N or 1, turned] both, [B or 1, N, masked] additive, of the last columns
  void *y;                       // [B, N, hidden]
  const int64_t *starts;         // [B + 1] if x, residual and y have rows of only the first nodes of each text:
                                 // starts[b] to starts[b + 1]; NULL: of all
  int64_t texts, n, turned, masked;  // all nodes see the columns before the masked ones
  int64_t ab, an, mb, mn;            // strides of a text and of a node in angles and mask
  int threads;
} Forward;

static int64_t rows_in(const Forward *f) { return f->starts ? f->starts[f->texts] : f->texts * f->n; }

static int64_t text_of(const Forward *f, int64_t r) {  // the text of row r
  if (!f->starts) return r / f->n;
  int64_t b = 0;
  while (f->starts[b + 1] <= r) b++;
  return b;
}

// Norm of each of n rows, if there is a weight, and the rows as products read them. All threads call it.
static void read_rows(const Layer *a, const void *x, int norm, char *normed, const Rows *as, char *rows, int64_t n) {
  for (int64_t r = first_item(n); r < end_item(n); r++) {
    if (a->norms[norm]) norm_row(x, a->norms[norm], normed, r, as->in, a->eps, a->half);
    read_row(as, a->norms[norm] ? normed : x, rows, r);
  }
}

// Numbers [width] at x turned by `cos` and `sin` [turned] from `at` on, to `y`.
static void turn(const Layer *a, const Forward *f, const char *x, int64_t at, char *y) {
  int64_t middle = f->turned / 2, size = a->half ? 2 : 4;
  float rotated[a->d];
  for (int64_t i = 0; i < f->turned; i++) {
    float pair[1], other = i < middle ? a->sign * get(x, i + middle, a->half) : get(x, i - middle, a->half);
    put(pair, 0, other * get(f->sin, at + i, a->half), a->half);
    float beside = get(pair, 0, a->half);
    put(pair, 0, get(x, i, a->half) * get(f->cos, at + i, a->half), a->half);
    rotated[i] = get(pair, 0, a->half) + beside;
  }
  for (int64_t i = 0; i < f->turned; i++) put(y, i, rotated[i], a->half);
  memmove(y + f->turned * size, x + f->turned * size, (a->d - f->turned) * size);
}

// Head `head` of the queries, then of the keys, then of the values, of row r. Keys and values go to the cache.
static void place(const Layer *a, const Forward *f, const Cache *c, char *q, char *k, char *v, int64_t r, int64_t head) {
  int64_t size = a->half ? 2 : 4, row = a->d * size, b = text_of(f, r);
  int64_t node = r - (f->starts ? f->starts[b] : b * f->n);
  int64_t angle = b * f->ab + node * f->an, column = c->columns - f->n + node;
  int key = head >= a->heads, value = head >= a->heads + a->kv, norm = key ? OF_KEYS : OF_QUERIES;
  char *x = q + (r * a->heads + head) * row, *to = x;
  if (key) {
    int64_t own = head - a->heads - (value ? a->kv : 0);
    x = (value ? v : k) + (r * a->kv + own) * row;
    to = (char *)(value ? c->values : c->keys) + ((b * a->kv + own) * c->capacity + column) * row;
  }
  if (value) { memcpy(to, x, row); return; }
  if (a->norms[norm]) norm_row(x, a->norms[norm], x, 0, a->d, a->eps, a->half);
  turn(a, f, x, angle, to);
}

// Numbers of share t of `shares`: z = x + y, in n rows of `hidden`.
static void add_rows(const Layer *a, const void *x, const void *y, void *z, int64_t n, int shares, int t) {
  int64_t from = first_of(a->hidden, L, shares, t), to = first_of(a->hidden, L, shares, t + 1);
  for (int64_t r = 0; r < n; r++)
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

// Outputs [from, to): silu(gate) * up of n rows, as the last product reads them. Where it reads eight bits, these are
// whole blocks, and take the place of `gate` before they are rounded.
static void activate(const Layer *a, void *gate, const void *up, const Rows *as, char *down_rows, int64_t n,
                     int64_t from, int64_t to) {
  int64_t size = as->size, width = as->width;
  char *rows = down_rows;
  if (as->mode == ROUNDED) rows = gate, size = a->half ? 2 : 4, width = a->inner;
  for (int64_t r = 0; r < n; r++) {
    for (int64_t i = from; i < to; i += L) {
      int64_t at = r * a->inner + i;
      char *to_row = rows + (r * width + i) * size;
      if (i + L <= to) {
        F x = rounded(silu(load(gate, at, a->half)), a->half);
        store(to_row, 0, rounded(x * load(up, at, a->half), a->half), size == 2);
      } else for (int64_t c = 0; c < to - i; c++) {
        F x = rounded(silu(all(get(gate, at + c, a->half))), a->half);
        put(to_row, c, rounded(x * get(up, at + c, a->half), a->half)[0], size == 2);
      }
    }
    if (!from) memset(rows + (r * width + as->in) * size, 0, (width - as->in) * size);
    for (int64_t b = from / EIGHTS_BLOCK; b < to / EIGHTS_BLOCK && as->mode == ROUNDED; b++)
      round_block(rows + r * width * size, down_rows + r * as->bytes, as->in, b, a->half);
  }
}

// Where the steps of a layer write: rows as products read them, what the steps give, room for scores.
enum { ROWS_IN, ROWS_OUT, ROWS_MID, ROWS_DOWN, NORMED, Q, K, V, ATTENDED, ADDED, H_, G, U_, SCORES, PARTS };

typedef struct {
  Linear products[PRODUCTS];
  Rows rows[PRODUCTS];  // how they read their rows
  Attention attention;  // without queries and outputs
  int64_t places[PARTS];  // in the room, in bytes
} Plan;

// Plans the steps of a layer; returns how much room they take.
static int64_t plan_layer(const Layer *a, const Forward *f, const Cache *c, Plan *plan) {
  // 1. The products.
  int64_t size = a->half ? 2 : 4, n = rows_in(f), all_heads = a->heads * a->d, groups = a->kv * a->d;
  int64_t outs[PRODUCTS] = {all_heads, groups, groups, a->hidden, a->inner, a->inner, a->hidden};
  int64_t ins[PRODUCTS] = {a->in, a->in, a->in, all_heads, a->hidden, a->hidden, a->inner};
  for (int i = 0; i < PRODUCTS; i++) {
    plan->products[i] = (Linear){a->weights[i], a->biases[i], ins[i], outs[i], a->forms[i], a->half, f->threads, 0};
    plan->rows[i] = rows_for(ins[i], a->forms[i], a->half);
  }
  if (plan->rows[DOWN].mode == ROUNDED) plan->rows[GATE].unit = plan->rows[UP].unit = EIGHTS_BLOCK;

  // 2. Attention.
  plan->attention = (Attention){
    .k = (char *)c->keys + c->first * a->d * size, .v = (char *)c->values + c->first * a->d * size,
    .mask = f->mask, .starts = f->starts, .texts = f->texts, .heads = a->heads, .kv = a->kv, .n = f->n,
    .columns = c->columns - c->first, .free = c->columns - c->first - f->masked, .d = a->d, .dv = a->d,
    .qb = f->n * all_heads, .qh = a->d, .qn = all_heads, .mb = f->mb, .mn = f->mn,
    .kb = groups * c->capacity, .kh = a->d * c->capacity, .kt = a->d,
    .vb = groups * c->capacity, .vh = a->d * c->capacity, .vt = a->d,
    .scale = a->scale, .half = a->half, .threads = f->threads,
  };

  // 3. Room.
  const Rows *rows = plan->rows;
  int64_t all_rows = padded(&rows[QUERY], n), width = MAX(a->in, a->hidden), used = 0;
  int64_t sizes[PARTS] = {
    all_rows * rows[QUERY].bytes, all_rows * rows[OUTPUT].bytes, all_rows * rows[GATE].bytes,
    all_rows * rows[DOWN].bytes, n * width * size,
    n * all_heads * size, n * groups * size, n * groups * size, n * all_heads * size,
    n * a->hidden * size, n * a->hidden * size, n * a->inner * size, n * a->inner * size,
    bytes_of_attention(&plan->attention),
  };
  for (int i = 0; i < PARTS; i++) {
    plan->places[i] = used;
    used += (sizes[i] + 63) / 64 * 64;
  }
  return used;
}

// A layer; all threads of a region call it. A share of the outputs of gate and up is one of what follows them.
static void layer(const Layer *a, const Forward *f, const Cache *c, char *room, Team *team) {
  Plan plan;
  plan_layer(a, f, c, &plan);
  const Linear *p = plan.products;
  const Rows *as = plan.rows;
  char *at[PARTS];
  for (int i = 0; i < PARTS; i++) at[i] = room + plan.places[i];
  plan.attention.q = at[Q], plan.attention.out = at[ATTENDED];
  int64_t n = rows_in(f), heads = a->heads + 2 * a->kv, items = n * heads;
  int shares = f->threads, first = omp_get_thread_num(), step = omp_get_num_threads();
  read_rows(a, f->x, BEFORE_ATTENTION, at[NORMED], &as[QUERY], at[ROWS_IN], n);
  meet(team);
  for (int i = QUERY; i <= VALUE; i++) share_all(&p[i], &as[i], at[ROWS_IN], at[Q + i], n);
  meet(team);
  for (int64_t i = first_item(items), end = end_item(items); i < end; i++)
    place(a, f, c, at[Q], at[K], at[V], i / heads, i % heads);
  meet(team);
  attend(&plan.attention, (float *)at[SCORES], team);
  meet(team);
  for (int64_t r = first_item(n); r < end_item(n); r++) read_row(&as[OUTPUT], at[ATTENDED], at[ROWS_OUT], r);
  meet(team);
  for (int t = first; t < shares; t += step) {
    share(&p[OUTPUT], &as[OUTPUT], at[ROWS_OUT], at[ADDED], n, t);
    add_rows(a, f->residual, at[ADDED], at[H_], n, shares, t);
  }
  meet(team);
  read_rows(a, at[H_], BEFORE_MLP, at[NORMED], &as[GATE], at[ROWS_MID], n);
  meet(team);
  for (int t = first; t < shares; t += step) {
    share(&p[GATE], &as[GATE], at[ROWS_MID], at[G], n, t);
    share(&p[UP], &as[UP], at[ROWS_MID], at[U_], n, t);
    int64_t from = first_of(a->inner, as[GATE].unit, shares, t), to = first_of(a->inner, as[GATE].unit, shares, t + 1);
    activate(a, at[G], at[U_], &as[DOWN], at[ROWS_DOWN], n, from, to);
  }
  meet(team);
  for (int t = first; t < shares; t += step) {
    share(&p[DOWN], &as[DOWN], at[ROWS_DOWN], at[ADDED], n, t);
    add_rows(a, at[H_], at[ADDED], f->y, n, shares, t);
  }
  meet(team);
}

// Layers in a row: the first reads `x` and `residual`, each further one the output `y` of the one before, in its place.
int layers(const Layer *all, const Cache *caches, int64_t many, const Forward *forward) {
  Forward first = *forward;
  if (!rows_in(&first)) return DONE;
  first.threads = choose_threads(first.threads);
  int64_t most = 0;
  for (int64_t i = 0; i < many; i++) {
    Plan plan;
    most = MAX(most, plan_layer(&all[i], &first, &caches[i], &plan));
  }
  char *room = take_room(most);
  if (!room) return NO_MEMORY;
  Forward further = first;
  further.x = further.residual = first.y;
  Team team = {};
  double begun = omp_get_wtime();
#pragma omp parallel num_threads(first.threads)
  for (int64_t i = 0; i < many; i++) layer(&all[i], i ? &further : &first, &caches[i], room, &team);
  end_region(&team, first.threads, begun);
  free(room);
  return DONE;
}

// A step of an EAGLE head over nodes of several texts. EAGLE-1 has a product before its layer, EAGLE-3 norms around it,
// and adds the feature to what its attention gives:
//
//   [embedding, feature] -> input -> layer -> state -> output -> logits
//   [norm(embedding), norm(feature)] -> layer -> state -> norm -> output -> logits
enum { OF_EMBEDDINGS, OF_FEATURES, OF_STATES, HEAD_NORMS };

typedef struct {
  Layer layer;
  Linear input, output;           // without a weight of `input` the layer reads the pair [embedding, feature] itself
  Linear embedding;               // V outputs of `hidden` inputs, packed in blocks; in other forms rows [V, hidden]
  const void *norms[HEAD_NORMS];  // weights [hidden]; NULL for none
  int64_t adds_normed, gives_normed;  // whether the feature is added normed; whether the states are given normed
} HeadStep;

typedef struct {
  const int64_t *tokens, *parents;     // [R] of all texts, one after the other; node i reads row parents[i] of the features
  const int64_t *positions;            // [R]: the rows of `cos` and `sin`
  const int64_t *starts;               // [B + 1] as in `Forward`
  const int64_t *drafted;              // [rows]: the rows of the states whose logits are computed; ascending with `own`
  const int64_t *vocabulary;           // the target's token for each of `tokens`; NULL: itself
  const Linear *own;                   // [B], all of one size: draft tokens of each text, behind those of `output`; NULL: none
  const int64_t *own_tokens;           // [B, outputs of each]: the target's tokens for these
  const void *features;                // [.., hidden]
  const void *cos, *sin;               // [positions, turned]
  const void *mask;                    // as in `Forward`
  void *keys, *values, *states;        // as in `Cache`; [R, hidden]
  void *last, *logits;                 // [rows, hidden], [rows, drafted tokens]
  int64_t texts, n, rows, turned, columns, capacity, first, free, threads;  // n: the most nodes of a text
} HeadNodes;

// Copies a row [hidden], normed if the head has that norm.
static void copy_row(const HeadStep *head, int norm, const void *from, void *to) {
  const Layer *a = &head->layer;
  if (head->norms[norm]) norm_row(from, head->norms[norm], to, 0, a->hidden, a->eps, a->half);
  else memcpy(to, from, a->hidden * (a->half ? 2 : 4));
}

// Copies the embedding of a token, as `copy_row`.
static void copy_embedding(const HeadStep *head, int64_t token, void *to) {
  const Linear *e = &head->embedding;
  int64_t row = e->in * (head->layer.half ? 2 : 4);
  if (e->form < Q8_0) { copy_row(head, OF_EMBEDDINGS, (const char *)e->weight + token * row, to); return; }
  read_eights(e->weight, token, to, e->in, e->out, e->form, head->layer.half);
  if (head->norms[OF_EMBEDDINGS]) copy_row(head, OF_EMBEDDINGS, to, to);
}

int head_step(const HeadStep *head, const HeadNodes *nodes) {
  // 1. Pairs [embedding, feature], and room for what the input gives, or else the features that are added, and for what
  // the output reads. Angles lie as [B, N].
  const Layer *a = &head->layer;
  Linear input = head->input, output = head->output;
  int64_t n = nodes->n, all = nodes->starts[nodes->texts], size = a->half ? 2 : 4, row = a->hidden * size;
  int64_t angles = nodes->turned * size;
  if (!all) return DONE;
  char *room = malloc((3 * all + nodes->rows) * row + 2 * nodes->texts * n * angles);
  if (!room) return NO_MEMORY;
  char *pairs = room, *x = pairs + 2 * all * row, *read = x + all * row;
  char *cos = read + nodes->rows * row, *sin = cos + nodes->texts * n * angles;
  for (int64_t b = 0; b < nodes->texts; b++)
    for (int64_t i = nodes->starts[b]; i < nodes->starts[b + 1]; i++) {
      int64_t token = nodes->tokens[i];
      if (nodes->vocabulary && nodes->own && token >= output.out)
        token = nodes->own_tokens[b * nodes->own->out + token - output.out];
      else if (nodes->vocabulary) token = nodes->vocabulary[token];
      int64_t place = (b * n + i - nodes->starts[b]) * angles, position = nodes->positions[i];
      const char *feature = (const char *)nodes->features + nodes->parents[i] * row;
      char *pair = pairs + 2 * i * row;
      copy_embedding(head, token, pair);
      copy_row(head, OF_FEATURES, feature, pair + row);
      if (!input.weight) memcpy(x + i * row, head->adds_normed ? pair + row : feature, row);
      memcpy(cos + place, (const char *)nodes->cos + position * angles, angles);
      memcpy(sin + place, (const char *)nodes->sin + position * angles, angles);
    }

  // 2. The layer.
  int64_t masked = nodes->columns - nodes->free;
  Forward f = {
    .x = input.weight ? x : pairs, .residual = x, .cos = cos, .sin = sin, .mask = nodes->mask, .y = nodes->states,
    .starts = nodes->starts, .texts = nodes->texts, .n = n, .turned = nodes->turned, .masked = masked,
    .ab = n * nodes->turned, .an = nodes->turned, .mb = n * masked, .mn = masked, .threads = nodes->threads,
  };
  Cache c = {nodes->keys, nodes->values, nodes->columns, nodes->capacity, nodes->first};
  input.threads = output.threads = nodes->threads;
  int failed = input.weight ? linear(&input, pairs, x, all) : DONE;
  if (!failed) failed = layers(a, &c, 1, &f);
  if (failed) { free(room); return failed; }

  // 3. The logits, from the normed states.
  char *states = nodes->states, *last = nodes->last;
  if (head->gives_normed)
    for (int64_t i = 0; i < all; i++) norm_row(states, head->norms[OF_STATES], states, i, a->hidden, a->eps, a->half);
  for (int64_t i = 0; i < nodes->rows; i++) {
    memcpy(last + i * row, states + nodes->drafted[i] * row, row);
    if (head->gives_normed) memcpy(read + i * row, last + i * row, row);
    else copy_row(head, OF_STATES, last + i * row, read + i * row);
  }
  output.row = output.out + (nodes->own ? nodes->own->out : 0);
  failed = linear(&output, read, nodes->logits, nodes->rows);

  // 4. Those of each text's own tokens stand behind them.
  for (int64_t b = 0, from = 0, to = 0; nodes->own && !failed && b < nodes->texts; b++, from = to) {
    while (to < nodes->rows && nodes->drafted[to] < nodes->starts[b + 1]) to++;
    Linear own = nodes->own[b];
    own.row = output.row, own.threads = nodes->threads;
    failed = linear(&own, read + from * row, (char *)nodes->logits + (from * output.row + output.out) * size, to - from);
  }
  free(room);
  return failed;
}

enum { ABI = 8 };  // counted up when a structure or a parameter changes, here and in structs.py

// Writes the sizes [7] of the structures in bytes; returns the ABI.
int describe_abi(int64_t *sizes) {
  sizes[0] = sizeof(Linear), sizes[1] = sizeof(Attention), sizes[2] = sizeof(Layer), sizes[3] = sizeof(Cache);
  sizes[4] = sizeof(Forward), sizes[5] = sizeof(HeadStep), sizes[6] = sizeof(HeadNodes);
  return ABI;
}
