/* What is done for every piece of a transfer: runs copied between two buffers, offsets checked, addresses written down.
 *
 * Runs are copied without the interpreter's lock.
 * Two runs are copied at a time, 128 bytes of each in turn: while one starts, and waits for memory, the other keeps memory busy. The
 * second comes from the other half of the list, so that both halves are walked in the caller's order (sorted by source: the processor
 * then foresees what is read next). On x86-64 full chunks are stored past the caches, as memcpy does with one large copy.
 * Every run is checked against both buffers before the first byte is copied. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
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

static PyObject *copy_runs(PyObject *module, PyObject *args)
{
    Py_buffer ends[2], numbers[3];
    (void)module;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*:copy_runs", &ends[0], &ends[1], &numbers[0], &numbers[1], &numbers[2]))
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

/* A sum of bits has its sign when one of the numbers had: no branch for each, so the compiler does several at a time. */
static int64_t bits_outside(const int64_t *offsets, Py_ssize_t count, int64_t last)
{
    uint64_t bits = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        bits |= (uint64_t)offsets[i] | ((uint64_t)last - (uint64_t)offsets[i]);
    return (int64_t)bits;
}

static PyObject *are_within(PyObject *module, PyObject *args)
{
    Py_buffer offsets;
    long long last;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*L:are_within", &offsets, &last))
        return NULL;
    Py_ssize_t count = offsets.len / (Py_ssize_t)sizeof(int64_t);
    int are_inside = last >= 0 ? bits_outside(offsets.buf, count, last) >= 0 : count == 0;
    PyBuffer_Release(&offsets);
    return PyBool_FromLong(are_inside);
}

static PyObject *add_all(PyObject *module, PyObject *args)
{
    Py_buffer table, offsets;
    Py_ssize_t first;
    long long base;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*ny*L:add_all", &table, &first, &offsets, &base))
        return NULL;
    Py_ssize_t count = offsets.len / (Py_ssize_t)sizeof(int64_t), room = table.len / (Py_ssize_t)sizeof(int64_t);
    int fits = first >= 0 && first <= room && count <= room - first;
    uint64_t bits = 0;
    if (fits) {
        uint64_t *to = (uint64_t *)table.buf + first;
        const uint64_t *from = offsets.buf;
        for (Py_ssize_t i = 0; i < count; i++) {
            to[i] = from[i] + (uint64_t)base;
            bits |= to[i];
        }
    }
    PyBuffer_Release(&table);
    PyBuffer_Release(&offsets);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the offsets leave the table");
        return NULL;
    }
    return PyLong_FromLongLong((long long)bits);
}

static PyMethodDef methods[] = {
    {"are_within", are_within, METH_VARARGS, "are_within(offsets, last): whether every one of them is from 0 to last."},
    {"add_all", add_all, METH_VARARGS, "add_all(table, first, offsets, base): table[first + i] = offsets[i] + base; all of these, or-ed."},
    {"copy_runs", copy_runs, METH_VARARGS, "copy_runs(target, source, targets, sources, sizes): copy every run, or none and ValueError."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_copy", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void)
{
    return PyModule_Create(&definition);
}
