// What a plane is said to take, coded, is what Huffman's code takes where that is known.

#include <cmath>
#include <cstddef>
#include <vector>

#include "harness.hpp"
#include "planes/coded_bytes.hpp"

namespace dsh::test {
namespace {

std::vector<std::byte> chosen(std::size_t count, std::uint64_t values, Random &random) {
    std::vector<std::byte> bytes(count);
    for (std::byte &byte : bytes) {
        byte = static_cast<std::byte>(random.between(0, values - 1));
    }
    return bytes;
}

bool is_near(double found, double expected) { return std::abs(found - expected) < 0.02 * expected; }

} // namespace

TEST(values_that_are_as_frequent_take_their_bits) {
    Random random(9);
    for (const std::uint64_t values : {2, 4, 16, 64, 256}) {
        const auto bytes = chosen(60'000, values, random);
        CHECK(is_near(coded_bytes(bytes), 60'000 * std::log2(static_cast<double>(values)) / 8));
    }
}

TEST(a_value_that_is_frequent_takes_a_whole_bit) {
    Random random(10);
    // Three in four are 0, the others one of 1 to 16: a bit each, and four more for those.
    std::vector<std::byte> bytes(64'000);
    for (std::byte &byte : bytes) {
        byte = static_cast<std::byte>(random.between(0, 3) != 0 ? 0 : random.between(1, 16));
    }
    CHECK(is_near(coded_bytes(bytes), 64'000 * (1 + 4 / 4.0) / 8));
}

TEST(runs_take_nothing) {
    CHECK(coded_bytes({}) == 0);
    CHECK(coded_bytes(std::vector(100'003, std::byte{7})) == 0);
    Random random(11);
    auto bytes = chosen(10'000, 256, random);
    const double alone = coded_bytes(bytes);
    bytes.resize(200'000, std::byte{5});
    CHECK(is_near(coded_bytes(bytes), alone));
}

} // namespace dsh::test
