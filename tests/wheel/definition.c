/* Are products and norms, bit for bit, what simd.h says that they are? Here the definition is followed one number at a
   time, in plain C that no instruction set changes.

       definition LIBRARY WIDTH        the library of ops; its SUM_WIDTH

   A sum over k: partial sum i takes the elements i, i + WIDTH, i + 2 WIDTH, ... with one rounding per multiply-add; then
   halves are added until four are left, and (0 + 1) + (2 + 3). */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"
#include "rows.h"

#define MOST 700 /* of k */

static size_t width;

static float sum_of(float *partial) {
    for (size_t n = width; n > 4; n /= 2)
        for (size_t i = 0; i < n / 2; i++) partial[i] += partial[i + n / 2];
    return (partial[0] + partial[1]) + (partial[2] + partial[3]);
}

static float dot(const float *a, const float *b, size_t k) {
    float partial[16] = {0};
    for (size_t i = 0; i < k; i++) partial[i % width] = fmaf(a[i], b[i], partial[i % width]);
    return sum_of(partial);
}

/* Squares are summed in four such sums; what is no whole number of the four goes to the first. */
static float norm_factor(const float *x, size_t k, float eps) {
    float partial[4][16] = {{0}};
    size_t whole = k / (4 * width) * (4 * width);
    for (size_t i = 0; i < k; i++) {
        float *at = &partial[i < whole ? i / width % 4 : 0][i % width];
        *at = fmaf(x[i], x[i], *at);
    }
    for (size_t i = 0; i < width; i++)
        partial[0][i] = (partial[0][i] + partial[1][i]) + (partial[2][i] + partial[3][i]);
    return 1.0f / sqrtf(sum_of(partial[0]) / (float)k + eps);
}

static float number(void) {
    float x = ldexpf((float)random() / (float)RAND_MAX - 0.5f, (int)(random() % 40) - 20);
    return random() % 3 ? x : ldexpf((float)(random() % 19 - 9), (int)(random() % 40) - 20);
}

/* Of this type, near `number()`, and what it is as a float32. */
static float weight(enum dtype dtype, void *at) {
    float x = number();
    if (dtype == F32) {
        memcpy(at, &x, sizeof x);
        return x;
    }
    bf16 half = dtype == BF16 ? f32_to_bf16(x) : f32_to_f16(x);
    memcpy(at, &half, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&x, &bits, sizeof x);
    return dtype == BF16 ? x : f16_to_f32(half);
}

static int num_wrong;

static void expect(const char *what, float expected, float found) {
    if (memcmp(&expected, &found, sizeof found) && ++num_wrong <= 5)
        printf("%s: %a instead of %a\n", what, (double)found, (double)expected);
}

static void check_linear(void (*linear)(const struct linear_args *), enum dtype dtype, size_t m, size_t n, size_t k) {
    size_t element = dtype == F32 ? 4 : 2;
    float *x = malloc(m * k * sizeof(float)), *y = malloc(m * n * sizeof(float)), *w = malloc(n * k * sizeof(float));
    char *weights = malloc(n * k * element);
    for (size_t i = 0; i < m * k; i++) x[i] = number();
    for (size_t i = 0; i < n * k; i++) w[i] = weight(dtype, weights + i * element);
    linear(&(struct linear_args){.x = x, .weight = weights, .out = y, .num_rows = (int64_t)m, .num_columns = (int64_t)n,
                                 .k = (int64_t)k, .weight_stride = (int64_t)k, .dtype = dtype, .scale = 1});
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) expect("a product", dot(x + i * k, w + j * k, k), y[i * n + j]);
    free(x), free(y), free(w), free(weights);
}

/* Of a quantised weight: its codes are made one by one, and so are the numbers that they mean. */
static float code(enum codes kind, size_t i, uint8_t *row) {
    uint8_t bits = (uint8_t)random();
    if (kind == E4M3 && (bits & 127) == 127) bits = 8;
    if (kind == E4M3 || kind == INT8) row[i] = bits;
    else row[i / 32 * 16 + i % 16] |= (uint8_t)((bits & 15) << (i % 32 / 16 * 4));
    static const float floats[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    switch (kind) {
        case INT8: return (float)(int8_t)bits;
        case INT4: return (float)(bits & 15);
        case E2M1: return bits & 8 ? -floats[bits & 7] : floats[bits & 7];
        default: break;
    }
    int exponent = bits >> 3 & 15;
    float x = ldexpf((float)(exponent ? 8 + (bits & 7) : bits & 7), (exponent ? exponent : 1) - 10);
    return bits & 128 ? -x : x;
}

static float rounded(enum dtype dtype, float x) {
    uint32_t bits = (uint32_t)f32_to_bf16(x) << 16;
    if (dtype == BF16) memcpy(&x, &bits, sizeof x);
    return dtype == F16 ? f16_to_f32(f32_to_f16(x)) : x;
}

static void check_quantised(void (*linear)(const struct linear_args *), enum codes kind, enum dtype dtype, size_t m,
                            size_t n, size_t k, size_t group) {
    size_t stride = (k + 31) / 32 * 32, num_groups = (k + group - 1) / group;
    float *x = malloc(m * k * sizeof(float)), *y = malloc(m * n * sizeof(float)), *w = malloc(n * k * sizeof(float));
    float *scales = malloc(n * num_groups * sizeof(float));
    uint8_t *codes = calloc(n, stride);
    int8_t *zeros = malloc(n * num_groups);
    for (size_t i = 0; i < m * k; i++) x[i] = number();
    for (size_t i = 0; i < n * num_groups; i++) scales[i] = number(), zeros[i] = (int8_t)(random() % 16);
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < k; i++) {
            size_t at = j * num_groups + i / group;
            float zero = kind == INT8 || kind == INT4 ? zeros[at] : 0;
            w[j * k + i] = rounded(dtype, (code(kind, i, codes + j * stride) - zero) * scales[at]);
        }
    struct quantised q = {.codes = codes, .scales = scales, .zeros = zeros, .stride = (int64_t)stride,
                          .scale_stride = (int64_t)num_groups, .rows_per_scale = 1, .group = (int64_t)group,
                          .kind = kind, .scale_dtype = F32, .dtype = dtype};
    if (kind == E4M3 || kind == E2M1) q.zeros = NULL;
    linear(&(struct linear_args){.x = x, .weight = &q, .out = y, .num_rows = (int64_t)m, .num_columns = (int64_t)n,
                                 .k = (int64_t)k, .dtype = QUANTISED, .scale = 1});
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) expect("a quantised product", dot(x + i * k, w + j * k, k), y[i * n + j]);
    free(x), free(y), free(w), free(scales), free(codes), free(zeros);
}

static void check_norm(void (*norm)(const struct norm_args *), size_t k) {
    float x[MOST], w[MOST], y[MOST], eps = 1e-5f;
    for (size_t i = 0; i < k; i++) x[i] = number(), w[i] = number();
    norm(&(struct norm_args){.x = x, .out = y, .num_rows = 1, .size = (int64_t)k,
                             .norm = {.weight = w, .eps = eps, .scale = 1}});
    float factor = norm_factor(x, k, eps);
    for (size_t i = 0; i < k; i++) expect("a norm", w[i] * (x[i] * factor), y[i]);
}

int main(int num, char **arguments) {
    void *library = num == 3 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    if (!library) return fprintf(stderr, "%s\n", num == 3 ? dlerror() : "definition LIBRARY WIDTH"), 2;
    width = (size_t)atoi(arguments[2]);
    void (*linear)(const struct linear_args *), (*norm)(const struct norm_args *);
    *(void **)&linear = dlsym(library, "es_linear"), *(void **)&norm = dlsym(library, "es_norm");
    static const size_t rows[] = {1, 2, 3, 4, 5, 6, 7, 13, 60}, columns[] = {1, 2, 3, 4, 9, 22},
                        sizes[] = {1, 3, 4, 15, 16, 17, 64, 100, MOST};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        check_norm(norm, sizes[s]);
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
            for (size_t c = 0; c < sizeof columns / sizeof *columns; c++)
                for (int dtype = F32; dtype <= F16; dtype++)
                    check_linear(linear, (enum dtype)dtype, rows[r], columns[c], sizes[s]);
    }
    for (int kind = E4M3; kind <= E2M1; kind++)
        for (int dtype = F32; dtype <= F16; dtype++)
            for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
                check_quantised(linear, (enum codes)kind, (enum dtype)dtype, rows[r], 22, 100, 32);
                check_quantised(linear, (enum codes)kind, (enum dtype)dtype, rows[r], 9, 15, 64);
                check_quantised(linear, (enum codes)kind, (enum dtype)dtype, rows[r], 5, MOST, MOST);
            }
    printf("%d wrong\n", num_wrong);
    return num_wrong != 0;
}
