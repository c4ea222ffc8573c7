// The statistics kernels read no byte beside the run, and agree on every count.

#include <memory>

#include "harness.hpp"
#include "statistics/elements.hpp"
#include "statistics/statistics.hpp"

namespace dsh::test {
namespace {

constexpr const char *dtypes[] = {"F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "I64", "U64",
                                  "I32", "U32", "I16",  "U16", "I8",      "U8",      "BOOL"};

bool same_counts(const Statistics &a, const Statistics &b) {
    return a.count == b.count && a.nan == b.nan && a.inf == b.inf && a.zeros == b.zeros && a.min == b.min &&
           a.max == b.max && a.exponents == b.exponents && a.checksum == b.checksum;
}

std::uint64_t counted(const Statistics &statistics) {
    std::uint64_t sum = statistics.nan + statistics.inf + statistics.zeros;
    for (const std::uint64_t bin : statistics.exponents) {
        sum += bin;
    }
    return sum;
}

void compare_kernels(Random &random, const char *dtype, std::size_t count) {
    // Exactly as large as the run and at an odd address, so that a sanitizer sees every step beside it.
    const std::size_t nbytes = count * elements_of(dtype).nbytes;
    const auto memory = std::make_unique<std::uint8_t[]>(nbytes + 1);
    for (std::size_t i = 0; i < nbytes; ++i) {
        memory[i + 1] = static_cast<std::uint8_t>(random.between(0, 3) == 0 ? 0 : random.between(0, 255));
    }
    const Run run{memory.get() + 1, nbytes, dtype, random.between(0, 1 << 20)};
    const Statistics reference = statistics(run, 5, 64, "portable");
    CHECK(reference.count == count);
    CHECK(counted(reference) == count);
    for (const std::string &kernel : statistics_kernels()) {
        CHECK(same_counts(statistics(run, 5, 64, kernel), reference));
        CHECK(same_counts(statistics(run, 5, 0, kernel), reference));
    }
}

TEST(kernels_read_only_the_run_and_agree_on_counts) {
    Random random(7);
    for (const char *dtype : dtypes) {
        for (std::size_t count = 0; count < 40; ++count) {
            compare_kernels(random, dtype, count);
        }
        compare_kernels(random, dtype, 5'000 + random.between(0, 40));
    }
}

} // namespace
} // namespace dsh::test
