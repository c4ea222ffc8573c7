// The reader where the file system refuses a direct read, or interrupts any.

#include <cerrno>
#include <fstream>
#include <string>
#include <vector>

#include "base/files/io_error.hpp"
#include "failing_calls.hpp"
#include "harness.hpp"
#include "reader/read.hpp"

namespace dsh::test {
namespace {

constexpr std::uint64_t nbytes = 3 << 20;

struct Stored {
    std::string path = scratch() / "stored";
    std::vector<char> content = std::vector<char>(nbytes);
    std::vector<char> target = std::vector<char>(nbytes);

    Stored() {
        Random random(1);
        for (char &byte : content) {
            byte = static_cast<char>(random.between(0, 255));
        }
        std::ofstream(path, std::ios::binary).write(content.data(), nbytes);
    }

    Digest read_all() {
        const auto address = reinterpret_cast<std::uint64_t>(target.data());
        return read({path}, {{0, {0, address, nbytes}}}, 256 << 10, 4, true).front();
    }
};

} // namespace

TEST(a_direct_read_that_is_refused_goes_on_through_the_page_cache) {
    Stored stored;
    failing_pread.fail(EINVAL, 1);
    CHECK(stored.read_all() == checksum(stored.content.data(), nbytes));
    CHECK(stored.target == stored.content);
}

TEST(a_read_that_is_refused_without_o_direct_too_is_an_error) {
    Stored stored;
    failing_pread.fail(EINVAL, 1000);
    int code = 0;
    try {
        stored.read_all();
    } catch (const IoError &error) {
        code = error.code;
    }
    failing_pread.fail(0, 0);
    CHECK(code == EINVAL);
}

TEST(an_interrupted_read_is_done_again) {
    Stored stored;
    failing_pread.fail(EINTR, 5);
    CHECK(stored.read_all() == checksum(stored.content.data(), nbytes));
}

} // namespace dsh::test
