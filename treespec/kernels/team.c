// The threads of a kernel: how they share work, how they wait for each other, and how many they are.
//
// A region of OpenMP runs a whole forward, and its threads meet several hundred times. Each meeting is as late as the
// last thread. Beside a busy process a thread loses its processor for milliseconds, and all others wait. So a thread
// that waits spins only briefly, and then sleeps, which leaves its processor to the one that it waits for; and kernels
// whose threads mostly wait run on fewer threads for a while.

#include <stdatomic.h>
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
static double omp_get_wtime(void) { return 0; }
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif
#ifdef __x86_64__
#include <immintrin.h>
#endif

// --- Meetings ---------------------------------------------------------------------------------------

typedef struct {
  // Each on a line of the cache of its own: threads that spin read `meetings` all the time.
  _Alignas(64) atomic_int meetings;
  _Alignas(64) atomic_int arrived;
  atomic_int sleepers;
  atomic_llong next;    // the next item of a loop whose items threads take one by one
  atomic_llong waited;  // nanoseconds that threads waited for, beyond the first moment
} Team;

enum { MOMENT = 50, SPINS = 2000 };  // a thread sleeps after about 50 microseconds; to wake it takes as long

static void pause_briefly(void) {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int has_changed(Team *team, int meetings) {
  return atomic_load_explicit(&team->meetings, memory_order_acquire) != meetings;
}

// Sleeps until another thread wakes this one, unless `meetings` has changed already.
static void sleep_at(Team *team, int meetings) {
#ifdef __linux__
  enum { FUTEX_WAIT_PRIVATE_ = 128 };
  atomic_fetch_add(&team->sleepers, 1);
  syscall(SYS_futex, &team->meetings, FUTEX_WAIT_PRIVATE_, meetings, NULL, NULL, 0);
  atomic_fetch_sub(&team->sleepers, 1);
#else
  (void)team, (void)meetings;
  sched_yield();
#endif
}

static void wake_all(Team *team) {
#ifdef __linux__
  enum { FUTEX_WAKE_PRIVATE_ = 129 };
  if (atomic_load(&team->sleepers)) syscall(SYS_futex, &team->meetings, FUTEX_WAKE_PRIVATE_, INT32_MAX, NULL, NULL, 0);
#else
  (void)team;
#endif
}

// Returns when all threads of the region have called it as often. What they wrote before is seen by all afterwards.
static void meet(Team *team) {
  int meetings = atomic_load_explicit(&team->meetings, memory_order_relaxed);
  if (atomic_fetch_add(&team->arrived, 1) + 1 == omp_get_num_threads()) {
    atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    atomic_store(&team->meetings, meetings + 1);
    wake_all(team);
    return;
  }
  for (int i = 0; i < MOMENT; i++) {
    if (has_changed(team, meetings)) return;
    pause_briefly();
  }
  double begun = omp_get_wtime();
  for (int i = MOMENT; i < SPINS && !has_changed(team, meetings); i++) pause_briefly();
  while (!has_changed(team, meetings)) sleep_at(team, meetings);
  atomic_fetch_add(&team->waited, (long long)((omp_get_wtime() - begun) * 1e9));
}

// --- Shares -----------------------------------------------------------------------------------------

// The next item that no thread has taken since the last meeting.
static int64_t take_next(Team *team) { return atomic_fetch_add(&team->next, 1); }

// The items [first_item, end_item) of this thread, of as many for all threads:   0 1 2 | 3 4 5 | 6 7
static int64_t first_item(int64_t items) { return items * omp_get_thread_num() / omp_get_num_threads(); }
static int64_t end_item(int64_t items) { return items * (omp_get_thread_num() + 1) / omp_get_num_threads(); }

// --- Size -------------------------------------------------------------------------------------------

// If threads wait for longer than this part of their time, fewer threads are faster. Two threads that each wait while
// the other has lost its processor take T = w + 2 (T - w) / 2 for the work w of each, and wait for (T - w) / 2T of their
// time: a fourth where T is the 2 w of one thread.
#define MOST_WAITING 0.25
#define WINDOW 0.03                       // seconds of kernels that are judged together
enum { FIRST_BREAK = 1, LAST_BREAK = 40 };  // tenths of a second until all threads are tried again; each doubles

typedef struct {
  int size;               // threads at most; 0: no limit
  int tenths;             // the break after the next judgement
  double retry;           // when all are tried again
  double worked, waited;  // seconds of all threads since the last judgement
} Choice;

// How many of `most` threads a kernel runs on, at the time `now`.
static int choose_size(const Choice *choice, int most, double now) {
  if (!choice->size || now >= choice->retry) return most;
  return choice->size < most ? choice->size : most;
}

// Takes note of a kernel that ran on `size` threads for `seconds`, of which they waited for `waited` in all.
static void note_waiting(Choice *choice, int size, double seconds, double waited, double now) {
  if (size == 1) return;
  choice->worked += size * seconds, choice->waited += waited;
  if (choice->worked < size * WINDOW) return;
  int crowded = choice->waited > MOST_WAITING * choice->worked;
  choice->worked = choice->waited = 0;
  if (!crowded) {
    if (!choice->size || now >= choice->retry) choice->size = 0, choice->tenths = FIRST_BREAK;
    return;
  }
  if (!choice->tenths) choice->tenths = FIRST_BREAK;
  choice->size = size > 2 ? size * 3 / 4 : 1;
  choice->retry = now + choice->tenths / 10.0;
  choice->tenths = choice->tenths < LAST_BREAK / 2 ? choice->tenths * 2 : LAST_BREAK;
}

static Choice common_choice;                     // of the process
static atomic_flag choosing = ATOMIC_FLAG_INIT;  // a thread reads or writes it

static int choose_threads(int most) {
  if (most == 1 || atomic_flag_test_and_set(&choosing)) return most;
  int size = choose_size(&common_choice, most, omp_get_wtime());
  atomic_flag_clear(&choosing);
  return size;
}

// After a region of `size` threads that began at `begun`.
static void end_region(const Team *team, int size, double begun) {
  double now = omp_get_wtime();
  if (size == 1 || atomic_flag_test_and_set(&choosing)) return;
  note_waiting(&common_choice, size, now - begun, team->waited * 1e-9, now);
  atomic_flag_clear(&choosing);
}
