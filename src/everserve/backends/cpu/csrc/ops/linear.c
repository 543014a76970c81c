/* out = scale * (x . weight^T (+ bias)) (+ residual). */

#include "linear.h"

#define ROWS_PER_TASK 256 /* of x, which then stay in the second-level cache from one panel of weights to the next */

struct linear {
    struct rows x, out;
    struct matrix weight;
    const struct linear_args *args;
    size_t num_rows, num_columns, rows_per_task, columns_per_task, column_tasks;
};

static void add_bias(const struct linear_args *args, float *out, size_t column, size_t n) {
    float bias[64];
    for (size_t j = 0; j < n; j += 64) {
        size_t count = smaller(n - j, 64), element = args->bias_dtype == F32 ? 4 : 2;
        widen((const char *)args->bias + (column + j) * element, (enum dtype)args->bias_dtype, count, bias);
        for (size_t i = 0; i < count; i++) out[j + i] += bias[i];
    }
}

/* A block of the output. */
static void linear_task(void *job, size_t task) {
    const struct linear *l = job;
    size_t row_0 = task / l->column_tasks * l->rows_per_task, column = task % l->column_tasks * l->columns_per_task;
    size_t m = smaller(l->num_rows - row_0, l->rows_per_task);
    size_t n = smaller(l->num_columns - column, l->columns_per_task);
    struct rows out = columns_from(rows_from(l->out, row_0), column);
    gemm(rows_from(l->x, row_0), m, matrix_from(l->weight, column), n, (size_t)l->args->k, out);
    for (size_t i = 0; i < m; i++) {
        float *out_row = row(&out, i);
        if (l->args->bias) add_bias(l->args, out_row, column, n);
        float scale = (float)l->args->scale;
        if (scale != 1.0f)
            for (size_t j = 0; j < n; j++) out_row[j] *= scale;
        if (l->args->residual) {
            const float *residual = l->args->residual + (row_0 + i) * l->num_columns + column;
            for (size_t j = 0; j < n; j++) out_row[j] += residual[j];
        }
    }
}

EXPORT void es_linear(const struct linear_args *args) {
    struct linear l = {
        .x = {(float *)args->x, NULL, (size_t)args->k},
        .out = {args->out, NULL, (size_t)args->num_columns},
        .weight = {args->weight, (size_t)args->weight_stride, args->dtype, 0},
        .args = args,
        .num_rows = (size_t)args->num_rows,
        .num_columns = (size_t)args->num_columns,
    };
    if (!l.num_rows || !l.num_columns) return;
    l.rows_per_task = smaller(l.num_rows, ROWS_PER_TASK);
    size_t row_tasks = (l.num_rows + l.rows_per_task - 1) / l.rows_per_task;
    l.columns_per_task = task_size(l.num_columns, row_tasks, 32);
    l.column_tasks = (l.num_columns + l.columns_per_task - 1) / l.columns_per_task;
    double macs = (double)args->num_rows * (double)args->num_columns * (double)args->k;
    parallel_for(row_tasks * l.column_tasks, macs, linear_task, &l);
}
