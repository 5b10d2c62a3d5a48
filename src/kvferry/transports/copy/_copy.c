/* What is done for every piece of a transfer: runs copied between two buffers, offsets checked, addresses written down. And what is done
 * for every kernel: it is started, and asked about until it is through. And what storage tiers do for every chunk of a prompt on the
 * engine's thread: its key is computed, and looked up in an index.
 *
 * Runs are copied, and devices spoken to, without the interpreter's lock.
 * Two runs are copied at a time, 128 bytes of each in turn: while one starts, and waits for memory, the other keeps memory busy. The
 * second comes from the other half of the list, so that both halves are walked in the caller's order (sorted by source: the processor
 * then foresees what is read next). On x86-64 full chunks are stored past the caches, as memcpy does with one large copy.
 * Every run is checked against both buffers before the first byte is copied. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif
#if defined(__aarch64__) && defined(__GNUC__)
#include <arm_neon.h>
#endif

#define CHUNK 128

typedef struct {
    char *target;
    const char *source;
    int64_t size;
} Run;

static inline void copy_chunk(char *target, const char *source)
{
#if defined(__SSE2__)
    if (((uintptr_t)target & 15) == 0) {
        for (int at = 0; at < CHUNK; at += 16)
            _mm_stream_si128((__m128i *)(target + at), _mm_loadu_si128((const __m128i *)(source + at)));
        return;
    }
#endif
    memcpy(target, source, CHUNK);
}

static void copy_two(Run one, Run two)
{
    int64_t common = (one.size < two.size ? one.size : two.size) / CHUNK * CHUNK;
    for (int64_t at = 0; at < common; at += CHUNK) {
        copy_chunk(one.target + at, one.source + at);
        copy_chunk(two.target + at, two.source + at);
    }
    memcpy(one.target + common, one.source + common, (size_t)(one.size - common));
    memcpy(two.target + common, two.source + common, (size_t)(two.size - common));
}

static void copy_all(char *target, const char *source, const int64_t *to, const int64_t *from, const int64_t *sizes, Py_ssize_t count)
{
    Py_ssize_t half = count / 2;
    for (Py_ssize_t i = 0; i < half; i++) {
        Run one = {target + to[i], source + from[i], sizes[i]};
        Run two = {target + to[i + half], source + from[i + half], sizes[i + half]};
        copy_two(one, two);
    }
    if (count % 2)
        memcpy(target + to[count - 1], source + from[count - 1], (size_t)sizes[count - 1]);
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

static int is_inside(int64_t start, int64_t size, Py_ssize_t length)
{
    return start >= 0 && size >= 0 && size <= length && start <= length - size;
}

static int check_all(const Py_buffer *ends, const Py_buffer *numbers)
{
    const int64_t *to = numbers[0].buf, *from = numbers[1].buf, *sizes = numbers[2].buf;
    if (numbers[0].len % (Py_ssize_t)sizeof(int64_t) || numbers[0].len != numbers[1].len || numbers[0].len != numbers[2].len) {
        PyErr_SetString(PyExc_ValueError, "targets, sources and sizes are not equally many 64-bit numbers");
        return 0;
    }
    for (Py_ssize_t i = 0; i < numbers[0].len / (Py_ssize_t)sizeof(int64_t); i++) {
        if (!is_inside(to[i], sizes[i], ends[0].len) || !is_inside(from[i], sizes[i], ends[1].len)) {
            PyErr_SetString(PyExc_ValueError, "a run leaves its buffer");
            return 0;
        }
    }
    return 1;
}

static PyObject *copy_segments(PyObject *module, PyObject *args)
{
    Py_buffer ends[2], numbers[3];
    (void)module;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*:copy_segments", &ends[0], &ends[1], &numbers[0], &numbers[1], &numbers[2]))
        return NULL;
    int is_valid = check_all(ends, numbers);
    if (is_valid) {
        Py_BEGIN_ALLOW_THREADS
        copy_all(ends[0].buf, ends[1].buf, numbers[0].buf, numbers[1].buf, numbers[2].buf, numbers[0].len / (Py_ssize_t)sizeof(int64_t));
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < 2; i++)
        PyBuffer_Release(&ends[i]);
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&numbers[i]);
    if (!is_valid)
        return NULL;
    Py_RETURN_NONE;
}

/* Loops over all offsets of a transfer, for several at a time: once for any processor, once for those of x86-64 with wider registers. */
#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_WIDE 1
#define WIDE __attribute__((target("avx2")))
#else
#define HAS_WIDE 0
#define WIDE
#endif

/* Or-ed, numbers have the sign bit when one of them has it: no branch for each. */
#define BITS_OUTSIDE                                                     \
    uint64_t bits = 0;                                                   \
    for (Py_ssize_t i = 0; i < count; i++)                               \
        bits |= offsets[i] | (last - offsets[i]);                        \
    return bits;

#define PUT_OFFSETS                                                      \
    uint64_t bits = 0, outside = 0;                                      \
    for (Py_ssize_t i = 0; i < count; i++) {                             \
        outside |= last - offsets[i];                                    \
        table[i] = offsets[i];                                           \
        bits |= offsets[i];                                              \
    }                                                                    \
    *all = bits;                                                         \
    return !((outside | bits) >> 63);

static uint64_t bits_outside(const uint64_t *offsets, Py_ssize_t count, uint64_t last) { BITS_OUTSIDE }
static int put_offsets(uint64_t *restrict table, const uint64_t *restrict offsets, Py_ssize_t count, uint64_t last, uint64_t *all)
{
    PUT_OFFSETS
}
#if HAS_WIDE
WIDE static uint64_t bits_outside_wide(const uint64_t *offsets, Py_ssize_t count, uint64_t last) { BITS_OUTSIDE }
WIDE static int put_offsets_wide(uint64_t *restrict table, const uint64_t *restrict offsets, Py_ssize_t count, uint64_t last, uint64_t *all)
{
    PUT_OFFSETS
}
#endif

static uint64_t any_outside(const uint64_t *offsets, Py_ssize_t count, uint64_t last)
{
#if HAS_WIDE
    if (__builtin_cpu_supports("avx2"))
        return bits_outside_wide(offsets, count, last);
#endif
    return bits_outside(offsets, count, last);
}

/* Whether all of them were from 0 to last. */
static int put(uint64_t *table, const uint64_t *offsets, Py_ssize_t count, uint64_t last, uint64_t *all)
{
#if HAS_WIDE
    if (__builtin_cpu_supports("avx2"))
        return put_offsets_wide(table, offsets, count, last, all);
#endif
    return put_offsets(table, offsets, count, last, all);
}

static int are_words(const Py_buffer *buffer)
{
    if (buffer->itemsize == (Py_ssize_t)sizeof(int64_t))
        return 1;
    PyErr_SetString(PyExc_BufferError, "these are not 64-bit numbers");
    return 0;
}

static PyObject *are_within(PyObject *module, PyObject *args)
{
    PyObject *numbers;
    Py_buffer offsets;
    long long last;
    (void)module;
    if (!PyArg_ParseTuple(args, "OL:are_within", &numbers, &last) || PyObject_GetBuffer(numbers, &offsets, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    PyObject *answer = NULL;
    if (are_words(&offsets)) {
        Py_ssize_t count = offsets.len / offsets.itemsize;
        int are_inside = last >= 0 ? !(any_outside(offsets.buf, count, (uint64_t)last) >> 63) : count == 0;
        answer = PyBool_FromLong(are_inside);
    }
    PyBuffer_Release(&offsets);
    return answer;
}

static PyObject *put_all(PyObject *module, PyObject *args)
{
    PyObject *into, *numbers, *answer = NULL;
    Py_buffer table, offsets;
    Py_ssize_t first;
    long long last;
    uint64_t bits;
    (void)module;
    if (!PyArg_ParseTuple(args, "OnOL:put_all", &into, &first, &numbers, &last))
        return NULL;
    if (PyObject_GetBuffer(numbers, &offsets, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    if (PyObject_GetBuffer(into, &table, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&offsets);
        return NULL;
    }
    if (are_words(&table) && are_words(&offsets)) {
        Py_ssize_t count = offsets.len / offsets.itemsize, room = table.len / table.itemsize;
        if (first < 0 || first > room || count > room - first)
            PyErr_SetString(PyExc_ValueError, "the offsets leave the table");
        else if (!put((uint64_t *)table.buf + first, offsets.buf, count, (uint64_t)last, &bits) || last < 0)
            PyErr_SetString(PyExc_IndexError, "an offset leaves its region");
        else
            answer = PyLong_FromLongLong((long long)bits);
    }
    PyBuffer_Release(&table);
    PyBuffer_Release(&offsets);
    return answer;
}

/* Where each place begins, and which offsets are its: PLACE_NUMBERS of them, one place after the other. */
#define PLACE_NUMBERS 5

static int put_place(int64_t *numbers, PyObject *source, PyObject *target, const long long *rest, uint64_t *bits)
{
    numbers[0] = source ? PyLong_AsLongLong(source) : -1;
    numbers[1] = target ? PyLong_AsLongLong(target) : -1;
    for (int i = 0; i < 3; i++)
        numbers[2 + i] = rest[i];
    *bits |= (uint64_t)(numbers[0] | numbers[1]);
    return !PyErr_Occurred();
}

static PyObject *put_places(PyObject *module, PyObject *args)
{
    PyObject *into, *sources, *targets;
    Py_buffer table;
    Py_ssize_t first;
    long long rest[3];
    uint64_t bits = 0;
    int is_valid = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OnO!O!(LLL):put_places", &into, &first, &PyTuple_Type, &sources, &PyTuple_Type, &targets, rest, rest + 1, rest + 2))
        return NULL;
    Py_ssize_t count = PyTuple_Size(sources);
    if (PyObject_GetBuffer(into, &table, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return NULL;
    if (are_words(&table)) {
        Py_ssize_t room = table.len / table.itemsize;
        is_valid = first >= 0 && first <= room && count <= (room - first) / PLACE_NUMBERS && PyTuple_Size(targets) == count;
        if (!is_valid)
            PyErr_SetString(PyExc_ValueError, "the places leave the table, or are not in pairs");
        for (Py_ssize_t i = 0; i < count && is_valid; i++)
            is_valid = put_place((int64_t *)table.buf + first + PLACE_NUMBERS * i, PyTuple_GetItem(sources, i), PyTuple_GetItem(targets, i), rest, &bits);
    }
    PyBuffer_Release(&table);
    return is_valid ? PyLong_FromLongLong((long long)bits) : NULL;
}

/* Calls of CUDA's driver, by their addresses: nothing of CUDA is needed to compile this, nor where there is no device. */
typedef int (*Upload)(uint64_t target, const void *source, size_t size, void *stream);
typedef int (*Launch)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared, void *stream, void **, void **);
typedef int (*Record)(void *event, void *stream);
#define OWN_PARAMETERS 3
#define MAX_PARAMETERS 16

static PyObject *start_kernel(PyObject *module, PyObject *args)
{
    unsigned long long upload, launch, record, table, pinned, function, stream, event;
    Py_ssize_t size;
    unsigned threads, shared, width, height;
    int num_parameters, numbers[2], call = 0, status = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "(KKK)(KKn)(KIIi)(II)(ii)KK:start_kernel", &upload, &launch, &record, &table, &pinned, &size, &function, &threads,
                          &shared, &num_parameters, &width, &height, numbers, numbers + 1, &stream, &event))
        return NULL;
    if (num_parameters < OWN_PARAMETERS || num_parameters > MAX_PARAMETERS) {
        PyErr_SetString(PyExc_ValueError, "too few or too many parameters");
        return NULL;
    }
    uint64_t nothing = 0;
    void *parameters[MAX_PARAMETERS] = {&table, numbers, numbers + 1}, *on = (void *)(uintptr_t)stream;
    for (int i = OWN_PARAMETERS; i < num_parameters; i++)
        parameters[i] = &nothing;
    Py_BEGIN_ALLOW_THREADS
    if (size)
        status = ((Upload)(uintptr_t)upload)(table, (const void *)(uintptr_t)pinned, (size_t)size, on);
    if (!status) {
        call = 1;
        status = ((Launch)(uintptr_t)launch)((void *)(uintptr_t)function, width, height, 1, threads, 1, 1, shared, on, parameters, NULL);
    }
    if (!status) {
        call = 2;
        status = ((Record)(uintptr_t)record)((void *)(uintptr_t)event, on);
    }
    Py_END_ALLOW_THREADS
    return Py_BuildValue("ii", call, status);
}

/* Rows of a storage tier: segments copied between addresses, with a checksum of the bytes as they arrived. The checksum is defined in
 * checksum.py. Another process may write to the source meanwhile, so each byte is read from the source exactly once: the bytes that are
 * stored are the bytes that are summed. (Reading them back from the target would be slower: processors write long segments past their
 * caches.) */
#define GROUP 64
#define PIECE 4096
#define HALF_WORDS (GROUP / 8)

static uint32_t sum_key[PIECE / 4];

static void fill_sum_key(void)
{
    for (uint64_t i = 0; i < PIECE / 8; i++) {
        uint64_t word = (i + 1) * 0x9E3779B97F4A7C15u;
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
        word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
        word ^= word >> 31;
        sum_key[2 * i] = (uint32_t)word;
        sum_key[2 * i + 1] = (uint32_t)(word >> 32);
    }
}

static uint64_t sum_group(const uint32_t *words, const uint32_t *key)
{
    uint64_t sum = 0, one = (uint64_t)1 << 32;
    for (int i = 0; i < HALF_WORDS; i++)
        sum += (one + (words[i] ^ key[i])) * (one + (words[i + HALF_WORDS] ^ key[i + HALF_WORDS]));
    return sum;
}

typedef uint64_t CopyGroups(char *target, const char *source, int64_t groups);

#if defined(__aarch64__) && defined(__GNUC__)
static uint64_t copy_groups_neon(char *target, const char *source, int64_t groups)
{
    uint64x2_t a = vdupq_n_u64(0), b = a, c = a, d = a;
    uint32x4_t s = vdupq_n_u32(0), t = s, u = s, v = s;
    const uint32_t *key = sum_key;
    for (; groups; groups--, source += GROUP, target += GROUP, key += GROUP / 4) {
        const uint32_t *from = (const uint32_t *)source;
        uint32_t *to = (uint32_t *)target;
        uint32x4_t w = vld1q_u32(from), x = vld1q_u32(from + 4), y = vld1q_u32(from + 8), z = vld1q_u32(from + 12);
        __asm__ volatile("" : "+w"(w), "+w"(x), "+w"(y), "+w"(z)); /* the compiler must not load them again */
        vst1q_u32(to, w);
        vst1q_u32(to + 4, x);
        vst1q_u32(to + 8, y);
        vst1q_u32(to + 12, z);
        w = veorq_u32(w, vld1q_u32(key));
        x = veorq_u32(x, vld1q_u32(key + 4));
        y = veorq_u32(y, vld1q_u32(key + 8));
        z = veorq_u32(z, vld1q_u32(key + 12));
        a = vmlal_u32(a, vget_low_u32(w), vget_low_u32(y));
        b = vmlal_high_u32(b, w, y);
        c = vmlal_u32(c, vget_low_u32(x), vget_low_u32(z));
        d = vmlal_high_u32(d, x, z);
        s = vaddq_u32(s, w);
        t = vaddq_u32(t, x);
        u = vaddq_u32(u, y);
        v = vaddq_u32(v, z);
    }
    uint64_t products = vaddvq_u64(vaddq_u64(vaddq_u64(a, b), vaddq_u64(c, d)));
    return products + ((uint64_t)vaddvq_u32(vaddq_u32(vaddq_u32(s, t), vaddq_u32(u, v))) << 32);
}
#endif

#if HAS_WIDE
WIDE static uint64_t copy_groups_wide(char *target, const char *source, int64_t groups)
{
    __m256i even = _mm256_setzero_si256(), odd = even, s = even, t = even;
    const __m256i *from = (const __m256i *)source, *key = (const __m256i *)sum_key;
    __m256i *to = (__m256i *)target;
    int is_aligned = ((uintptr_t)target & 31) == 0;
    for (; groups; groups--, from += 2, to += 2, key += 2) {
        __m256i x = _mm256_loadu_si256(from), y = _mm256_loadu_si256(from + 1);
        __asm__ volatile("" : "+x"(x), "+x"(y)); /* the compiler must not load them again */
        if (is_aligned) {
            _mm256_stream_si256(to, x);
            _mm256_stream_si256(to + 1, y);
        } else {
            _mm256_storeu_si256(to, x);
            _mm256_storeu_si256(to + 1, y);
        }
        x = _mm256_xor_si256(x, _mm256_loadu_si256(key));
        y = _mm256_xor_si256(y, _mm256_loadu_si256(key + 1));
        even = _mm256_add_epi64(even, _mm256_mul_epu32(x, y));
        odd = _mm256_add_epi64(odd, _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(y, 32)));
        s = _mm256_add_epi32(s, x);
        t = _mm256_add_epi32(t, y);
    }
    uint64_t products[4], sum = 0;
    uint32_t words[8], high = 0;
    _mm256_storeu_si256((__m256i *)products, _mm256_add_epi64(even, odd));
    _mm256_storeu_si256((__m256i *)words, _mm256_add_epi32(s, t));
    for (int i = 0; i < 4; i++)
        sum += products[i];
    for (int i = 0; i < 8; i++)
        high += words[i];
    return sum + ((uint64_t)high << 32);
}
#endif

/* For other processors: through a buffer that no other process sees. */
static uint64_t copy_groups_plain(char *target, const char *source, int64_t groups)
{
    uint32_t words[GROUP / 4];
    uint64_t sum = 0;
    for (int64_t i = 0; i < groups; i++) {
        memcpy(words, source + i * GROUP, GROUP);
        __asm__ volatile("" ::: "memory"); /* the compiler must not read the source instead */
        memcpy(target + i * GROUP, words, GROUP);
        sum += sum_group(words, sum_key + i * (GROUP / 4));
    }
    return sum;
}

static CopyGroups *fastest_copy_groups(void)
{
#if defined(__aarch64__) && defined(__GNUC__)
    return copy_groups_neon;
#endif
#if HAS_WIDE
    if (__builtin_cpu_supports("avx2"))
        return copy_groups_wide;
#endif
    return copy_groups_plain;
}

static uint64_t copy_piece(CopyGroups *copy_groups, char *target, const char *source, int64_t size)
{
    int64_t whole = size / GROUP * GROUP;
    uint64_t sum = copy_groups(target, source, whole / GROUP) + (uint64_t)size;
    if (size > whole) {
        uint32_t words[GROUP / 4] = {0};
        memcpy(words, source + whole, (size_t)(size - whole));
        __asm__ volatile("" ::: "memory");
        memcpy(target + whole, words, (size_t)(size - whole));
        sum += sum_group(words, sum_key + whole / 4);
    }
    return sum;
}

static void copy_and_sum_all(const Py_buffer *numbers)
{
    const int64_t *targets = numbers[0].buf, *sources = numbers[1].buf, *sizes = numbers[2].buf;
    uint64_t *sums = numbers[3].buf;
    CopyGroups *copy_groups = fastest_copy_groups();
    for (Py_ssize_t i = 0; i < numbers[0].len / 8; i++) {
        char *target = (char *)(uintptr_t)targets[i];
        const char *source = (const char *)(uintptr_t)sources[i];
        uint64_t sum = 0;
        for (int64_t at = 0; at < sizes[i]; at += PIECE) {
            int64_t left = sizes[i] - at;
            sum += copy_piece(copy_groups, target + at, source + at, left < PIECE ? left : PIECE);
            sum *= 0x9E3779B97F4A7C15u;
        }
        sums[i] = sum;
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

static PyObject *copy_and_sum(PyObject *module, PyObject *args)
{
    Py_buffer numbers[4];
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*w*:copy_and_sum", &numbers[0], &numbers[1], &numbers[2], &numbers[3]))
        return NULL;
    int is_valid = numbers[0].len % 8 == 0;
    for (int i = 1; i < 4; i++)
        is_valid = is_valid && numbers[i].len == numbers[0].len;
    if (is_valid) {
        Py_BEGIN_ALLOW_THREADS
        copy_and_sum_all(numbers);
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "targets, sources, sizes and sums are not equally many 64-bit numbers");
    for (int i = 0; i < 4; i++)
        PyBuffer_Release(&numbers[i]);
    if (!is_valid)
        return NULL;
    Py_RETURN_NONE;
}

/* Keys of chunks: BLAKE2b as in RFC 7693, without a key and with digests of KEY_BYTES. hashlib gives the same digests, but takes several
 * calls for each chunk. The callers hold the interpreter's lock: they take microseconds. */
#define KEY_BYTES 32
#define BLOCK_BYTES 128
#define PERSON_BYTES 16

typedef struct {
    uint64_t h[8];
    uint64_t num_hashed;
    size_t num_waiting; /* bytes of the block; a full block waits until it is known not to be the last */
    uint8_t block[BLOCK_BYTES];
} Blake2b;

static const uint64_t INITIAL[8] = {0x6A09E667F3BCC908u, 0xBB67AE8584CAA73Bu, 0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u,
                                    0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu, 0x1F83D9ABFB41BD6Bu, 0x5BE0CD19137E2179u};

static const uint8_t ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

/* Compilers turn these expressions into one load and one store. */
static uint64_t load_word(const uint8_t *b)
{
    return (uint64_t)b[0] | (uint64_t)b[1] << 8 | (uint64_t)b[2] << 16 | (uint64_t)b[3] << 24 | (uint64_t)b[4] << 32 |
           (uint64_t)b[5] << 40 | (uint64_t)b[6] << 48 | (uint64_t)b[7] << 56;
}

static void store_word(uint8_t *b, uint64_t word)
{
    b[0] = (uint8_t)word, b[1] = (uint8_t)(word >> 8), b[2] = (uint8_t)(word >> 16), b[3] = (uint8_t)(word >> 24);
    b[4] = (uint8_t)(word >> 32), b[5] = (uint8_t)(word >> 40), b[6] = (uint8_t)(word >> 48), b[7] = (uint8_t)(word >> 56);
}

#define ROTATED(word, bits) ((word) >> (bits) | (word) << (64 - (bits)))
#define MIX(a, b, c, d, x, y)                                            \
    a += b + (x), d = ROTATED(d ^ a, 32), c += d, b = ROTATED(b ^ c, 24); \
    a += b + (y), d = ROTATED(d ^ a, 16), c += d, b = ROTATED(b ^ c, 63);
#define WORD(round, i) m[ORDER[round][i]]
#define ROUND(i)                                                         \
    MIX(v[0], v[4], v[8], v[12], WORD(i, 0), WORD(i, 1))                 \
    MIX(v[1], v[5], v[9], v[13], WORD(i, 2), WORD(i, 3))                 \
    MIX(v[2], v[6], v[10], v[14], WORD(i, 4), WORD(i, 5))                \
    MIX(v[3], v[7], v[11], v[15], WORD(i, 6), WORD(i, 7))                \
    MIX(v[0], v[5], v[10], v[15], WORD(i, 8), WORD(i, 9))                \
    MIX(v[1], v[6], v[11], v[12], WORD(i, 10), WORD(i, 11))              \
    MIX(v[2], v[7], v[8], v[13], WORD(i, 12), WORD(i, 13))               \
    MIX(v[3], v[4], v[9], v[14], WORD(i, 14), WORD(i, 15))

static void compress(Blake2b *hash, int is_last)
{
    uint64_t m[16], v[16];
    for (int i = 0; i < 16; i++)
        m[i] = load_word(hash->block + 8 * i);
    for (int i = 0; i < 8; i++) {
        v[i] = hash->h[i];
        v[i + 8] = INITIAL[i];
    }
    v[12] ^= hash->num_hashed;
    if (is_last)
        v[14] = ~v[14];
    ROUND(0) ROUND(1) ROUND(2) ROUND(3) ROUND(4) ROUND(5) ROUND(6) ROUND(7) ROUND(8) ROUND(9) ROUND(0) ROUND(1)
    for (int i = 0; i < 8; i++)
        hash->h[i] ^= v[i] ^ v[i + 8];
}

/* `salt` and `person` have PERSON_BYTES each, filled up with zeros. */
static void begin_hash(Blake2b *hash, const char *salt, const char *person)
{
    memset(hash, 0, sizeof *hash);
    memcpy(hash->h, INITIAL, sizeof INITIAL);
    hash->h[0] ^= 0x01010000 ^ KEY_BYTES;
    for (int i = 0; i < 2; i++) {
        hash->h[4 + i] ^= load_word((const uint8_t *)salt + 8 * i);
        hash->h[6 + i] ^= load_word((const uint8_t *)person + 8 * i);
    }
}

static void add_to_hash(Blake2b *hash, const uint8_t *bytes, size_t size)
{
    while (size) {
        if (hash->num_waiting == BLOCK_BYTES) {
            hash->num_hashed += BLOCK_BYTES;
            compress(hash, 0);
            hash->num_waiting = 0;
        }
        size_t room = BLOCK_BYTES - hash->num_waiting, taken = size < room ? size : room;
        memcpy(hash->block + hash->num_waiting, bytes, taken);
        hash->num_waiting += taken;
        bytes += taken;
        size -= taken;
    }
}

/* The hash itself stays as it is, so that more can be added. */
static void put_digest(Blake2b hash, uint8_t *digest)
{
    memset(hash.block + hash.num_waiting, 0, BLOCK_BYTES - hash.num_waiting);
    hash.num_hashed += hash.num_waiting;
    compress(&hash, 1);
    for (int i = 0; i < KEY_BYTES / 8; i++)
        store_word(digest + 8 * i, hash.h[i]);
}

/* Whether all of these tokens are integers of 64 bits; else an exception is set. */
static int add_tokens(Blake2b *hash, PyObject *tokens, Py_ssize_t first, Py_ssize_t end)
{
    uint8_t bytes[BLOCK_BYTES];
    size_t size = 0;
    for (Py_ssize_t i = first; i < end; i++) {
        PyObject *token = PyList_GetItem(tokens, i);
        long long number = token ? PyLong_AsLongLong(token) : -1;
        if (number == -1 && PyErr_Occurred())
            return 0;
        store_word(bytes + size, (uint64_t)number);
        size += 8;
        if (size == sizeof bytes || i + 1 == end) {
            add_to_hash(hash, bytes, size);
            size = 0;
        }
    }
    return 1;
}

static PyObject *chunk_keys(PyObject *module, PyObject *args)
{
    static const char person[PERSON_BYTES] = "kvferry chunks", salt[PERSON_BYTES] = "";
    Py_buffer prefix;
    PyObject *tokens, *keys = NULL;
    Py_ssize_t chunk_tokens, first;
    Blake2b hash;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*O!nn:chunk_keys", &prefix, &PyList_Type, &tokens, &chunk_tokens, &first))
        return NULL;
    Py_ssize_t count = chunk_tokens > 0 ? PyList_Size(tokens) / chunk_tokens : -1;
    if (first < 0 || first > count)
        PyErr_SetString(PyExc_ValueError, "there is no such chunk");
    else if ((keys = PyBytes_FromStringAndSize(NULL, KEY_BYTES * (count - first)))) {
        uint8_t *digest = (uint8_t *)PyBytes_AsString(keys);
        begin_hash(&hash, salt, person);
        add_to_hash(&hash, prefix.buf, (size_t)prefix.len);
        int is_valid = add_tokens(&hash, tokens, 0, first * chunk_tokens);
        for (Py_ssize_t i = first; i < count && is_valid; i++, digest += KEY_BYTES) {
            is_valid = add_tokens(&hash, tokens, i * chunk_tokens, (i + 1) * chunk_tokens);
            put_digest(hash, digest);
        }
        if (!is_valid)
            Py_CLEAR(keys);
    }
    PyBuffer_Release(&prefix);
    return keys;
}

static PyObject *group_keys(PyObject *module, PyObject *args)
{
    static const char person[PERSON_BYTES] = "kvferry group";
    char salt[PERSON_BYTES] = "";
    Py_buffer keys;
    unsigned group;
    Blake2b hash;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*I:group_keys", &keys, &group))
        return NULL;
    snprintf(salt, sizeof salt, "%u", group);
    PyObject *found = PyBytes_FromStringAndSize(NULL, keys.len / KEY_BYTES * KEY_BYTES);
    for (Py_ssize_t at = 0; found && at < keys.len / KEY_BYTES * KEY_BYTES; at += KEY_BYTES) {
        begin_hash(&hash, salt, person);
        add_to_hash(&hash, (const uint8_t *)keys.buf + at, KEY_BYTES);
        put_digest(hash, (uint8_t *)PyBytes_AsString(found) + at);
    }
    PyBuffer_Release(&keys);
    return found;
}

/* The index of a host pool's segment, which tiers/pool/segment.py describes. Its owner may write to it meanwhile. */
#define SLOTS 8
#define AHEAD 16

static void mark_each(const uint64_t *slots, uint64_t last_bucket, const char *keys, Py_ssize_t count, uint8_t *found)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t words[2];
        if (i + AHEAD < count) {
            memcpy(words, keys + KEY_BYTES * (i + AHEAD), sizeof words);
            __builtin_prefetch(slots + (words[0] & last_bucket) * SLOTS);
        }
        memcpy(words, keys + KEY_BYTES * i, sizeof words);
        const uint64_t *bucket = slots + (words[0] & last_bucket) * SLOTS;
        int is_stored = 0;
        for (int slot = 0; slot < SLOTS; slot++)
            is_stored |= (bucket[slot] ^ words[1]) >> 32 == 0;
        found[i] |= (uint8_t)is_stored;
    }
}

static PyObject *mark_stored(PyObject *module, PyObject *args)
{
    Py_buffer slots, keys, found;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*w*:mark_stored", &slots, &keys, &found))
        return NULL;
    uint64_t num_buckets = (uint64_t)slots.len / (SLOTS * sizeof(uint64_t));
    int is_valid = num_buckets && !(num_buckets & (num_buckets - 1)) && keys.len == found.len * KEY_BYTES;
    if (is_valid)
        mark_each(slots.buf, num_buckets - 1, keys.buf, found.len, found.buf);
    else
        PyErr_SetString(PyExc_ValueError, "the buckets are no power of two, or there are not as many keys as answers");
    PyBuffer_Release(&slots);
    PyBuffer_Release(&keys);
    PyBuffer_Release(&found);
    if (!is_valid)
        return NULL;
    Py_RETURN_NONE;
}

/* Objects of a disk tier: a whole file is read while the interpreter's lock is given up once. With several threads, each time costs a
 * switch to another thread and back. */
#define MAX_PARTS 3
#define DIRECT_BYTES 4096

static int read_parts(const char *path, int flags, const struct iovec *parts, int count, struct stat *found, ssize_t *num_read)
{
    int file, failure = 0;
    do
        file = open(path, flags);
    while (file < 0 && errno == EINTR);
    if (file < 0)
        return errno;
    if (fstat(file, found) < 0)
        failure = errno;
    while (!failure && S_ISREG(found->st_mode) && (*num_read = preadv(file, parts, count, 0)) < 0)
        failure = errno == EINTR ? 0 : errno;
    close(file);
    return failure;
}

static PyObject *read_file(PyObject *module, PyObject *args)
{
    PyObject *path, *parts;
    Py_buffer views[MAX_PARTS];
    struct iovec into[MAX_PARTS];
    struct stat found;
    int flags, direct, count = 0, failure = 0;
    ssize_t num_read = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "O&iiO!:read_file", PyUnicode_FSConverter, &path, &flags, &direct, &PyTuple_Type, &parts))
        return NULL;
    while (count < PyTuple_Size(parts) && count < MAX_PARTS &&
           PyObject_GetBuffer(PyTuple_GetItem(parts, count), &views[count], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) == 0) {
        into[count] = (struct iovec){views[count].buf, (size_t)views[count].len};
        if ((uintptr_t)views[count].buf % DIRECT_BYTES || views[count].len % DIRECT_BYTES)
            direct = 0;
        count++;
    }
    int is_valid = count == PyTuple_Size(parts);
    if (is_valid) {
        const char *name = PyBytes_AsString(path);
        Py_BEGIN_ALLOW_THREADS
        failure = read_parts(name, flags | direct, into, count, &found, &num_read);
        Py_END_ALLOW_THREADS
    } else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a file is read into too many parts");
    while (count)
        PyBuffer_Release(&views[--count]);
    Py_DECREF(path);
    if (!is_valid)
        return NULL;
    if (failure) {
        errno = failure;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("ILdn", (unsigned)found.st_mode, (long long)found.st_size, (double)found.st_mtime, (Py_ssize_t)num_read);
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static PyObject *poll_until(PyObject *module, PyObject *args)
{
    unsigned long long function, argument;
    int waiting, answer;
    double seconds;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKid:poll_until", &function, &argument, &waiting, &seconds))
        return NULL;
    int (*ask)(void *) = (int (*)(void *))(uintptr_t)function;
    Py_BEGIN_ALLOW_THREADS
    double end = seconds_now() + seconds;
    do
        answer = ask((void *)(uintptr_t)argument);
    while (answer == waiting && seconds_now() < end);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(answer);
}

static PyObject *spin_wait(PyObject *module, PyObject *args)
{
    double seconds;
    (void)module;
    if (!PyArg_ParseTuple(args, "d:spin_wait", &seconds))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    double end = seconds_now() + seconds;
    while (seconds_now() < end)
        ;
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"are_within", are_within, METH_VARARGS, "are_within(offsets, last): whether every one of them is from 0 to last."},
    {"put_all", put_all, METH_VARARGS, "put_all(table, first, offsets, last): table[first + i] = offsets[i]; all of these, or-ed. IndexError unless all are from 0 to last."},
    {"put_places", put_places, METH_VARARGS, "put_places(table, first, sources, targets, rest): for each place its source, its target and the three numbers of the rest; all sources and targets, or-ed."},
    {"start_kernel", start_kernel, METH_VARARGS, "start_kernel((upload, launch, record), (table, pinned, size), (function, threads, shared, parameters), (width, height), (number, number), stream, event): bring the table to the device, start the kernel with it and the two numbers, record the event; which call was the last, and its status."},
    {"poll_until", poll_until, METH_VARARGS, "poll_until(function, argument, waiting, seconds): call the function at that address until it answers something else than `waiting`, for so long at most; its last answer."},
    {"spin_wait", spin_wait, METH_VARARGS, "spin_wait(seconds): so long, awake."},
    {"copy_segments", copy_segments, METH_VARARGS, "copy_segments(target, source, targets, sources, sizes): copy every run, or none and ValueError."},
    {"copy_and_sum", copy_and_sum, METH_VARARGS, "copy_and_sum(targets, sources, sizes, sums): copy segments between addresses; the checksum of every segment into sums."},
    {"chunk_keys", chunk_keys, METH_VARARGS, "chunk_keys(prefix, tokens, chunk_tokens, first): the keys of all full chunks of a list of tokens but the first, joined."},
    {"group_keys", group_keys, METH_VARARGS, "group_keys(keys, group): the keys of the same chunks in another KV-cache group, joined."},
    {"read_file", read_file, METH_VARARGS, "read_file(path, flags, direct, parts): read a regular file into these buffers, with the flag direct if all are aligned; its mode, size and time of last change, and how many bytes were read."},
    {"mark_stored", mark_stored, METH_VARARGS, "mark_stored(slots, keys, found): found[i] = 1 if the index has key i."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_copy", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void)
{
    fill_sum_key();
    return PyModule_Create(&definition);
}
